"""The tokenizer of a model as text: what a worker hands to the routers, which need no model files then.

A Hugging Face folder has it ready; from a GGUF file it is rebuilt (``gguf_tokenizer``).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from worker.loading import huggingface, is_gguf
from worker.models.config import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """Everything that decides which token ids a text becomes, and where an answer ends."""

    tokenizer_json: str
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = field(init=False)  # equal for equal tokenizers; part of the fleet's contract

    def __post_init__(self) -> None:
        canonical = json.dumps(
            [json.loads(self.tokenizer_json), self.chat_template, self.bos_token, self.eos_token, self.eos_token_ids],
            sort_keys=True,
        )
        object.__setattr__(self, "fingerprint", hashlib.sha256(canonical.encode()).hexdigest()[:32])

    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself. Raises ``ModelError`` where the ``tokenizers`` library cannot read it."""
        try:
            return Tokenizer.from_str(self.tokenizer_json)
        except Exception as error:  # what the library raises is of no narrower type
            raise ModelError(f"the tokenizer cannot be built from its tokenizer.json: {error}") from error


def load_tokenizer(path: Path) -> TokenizerFiles:
    """The tokenizer of the model at ``path``. Raises ``ModelError`` where it is missing or of an unknown kind."""
    if is_gguf(path):
        from worker.loading import gguf_tokenizer

        return gguf_tokenizer.load_tokenizer(path)
    return _from_folder(path)


def _from_folder(folder: Path) -> TokenizerFiles:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(f"{folder} has no tokenizer.json; older tokenizer formats are not read")
    huggingface.read_json(file)  # raises where it is broken, and says which file
    settings = huggingface.read_json(folder / "special_tokens_map.json")
    settings |= huggingface.read_json(folder / "tokenizer_config.json")
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.exists() else settings.get("chat_template")
    if isinstance(template, list):  # several templates by name: tool use, RAG; chats take the default one
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder}: the chat template in tokenizer_config.json is no text")
    return TokenizerFiles(
        tokenizer_json=file.read_text(encoding="utf-8"),
        chat_template=template,
        bos_token=_content(settings.get("bos_token")),
        eos_token=_content(settings.get("eos_token")),
        unk_token=_content(settings.get("unk_token")),
        pad_token=_content(settings.get("pad_token")),
        eos_token_ids=huggingface.load_config(folder).eos_token_ids,
    )


def _content(token: str | Mapping[str, Any] | None) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token
