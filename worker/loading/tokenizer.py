"""The tokenizer of a model as text: what a worker hands to the routers, which need no model files then.

A Hugging Face folder has it ready. From a GGUF file it is rebuilt: vocabulary, merges and special tokens stand in the
metadata, the rule that cuts text into words only as a name (``tokenizer.ggml.pre``).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from worker.loading import huggingface, is_gguf
from worker.models.config import ModelError

_SPECIAL, _USER_DEFINED = 3, 4  # GGUF token types: control, user defined


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
        return _from_gguf(path)
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


def _from_gguf(path: Path) -> TokenizerFiles:
    from worker.loading import gguf_file

    metadata = gguf_file.Metadata(path)
    model, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _WORD_RULES:
        raise ModelError(
            f"GGUF tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; supported: gpt2 with "
            f"{', '.join(sorted(_WORD_RULES))}. A Hugging Face folder of the same model carries its own tokenizer.json"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_WORD_RULES[pre])
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _SPECIAL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_SPECIAL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)

    def named(name: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return None if token_id is None else tokens[token_id]

    bos = named("bos")
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=bos,
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        eos_token_ids=gguf_file.load_config(path).eos_token_ids,
    )


def _byte_level(*, gpt2_words: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_words)


def _words(pattern: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _byte_level(gpt2_words=False)]


_GPT2 = [_byte_level(gpt2_words=True)]
_DIGITS_THEN_GPT2 = [pre_tokenizers.Digits(individual_digits=True), _byte_level(gpt2_words=True)]
# The rules' names and meanings are llama.cpp's (src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_*); the patterns are those of
# the tokenizer.json files of Llama 3 and Qwen 2.
_WORD_RULES: dict[str, list[Any]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "llama-bpe": _words(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": _words(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
