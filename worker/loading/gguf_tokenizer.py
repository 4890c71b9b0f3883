"""The tokenizer of a GGUF file, rebuilt for the ``tokenizers`` library.

Vocabulary, merges or scores, and special tokens stand in the metadata; the rule that cuts text into words only as a
name. What the names mean is llama.cpp's to say (src/llama-vocab.cpp: LLAMA_VOCAB_PRE_TYPE_* and what goes with them).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from worker.loading.gguf_file import END_TOKENS, Metadata, end_token_ids
from worker.loading.tokenizer import TokenizerFiles
from worker.models.config import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types


@dataclass(frozen=True, slots=True)
class _WordRule:
    """How text is cut into words, one pattern after the other, each within what those before it left whole."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that stands in the vocabulary is one token, whatever the merges make of it
    adds_bos: bool = False  # where the file does not say


# The patterns are those of the models' own tokenizer.json files.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_RULES = {
    "default": _WordRule((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "trillion"), _WordRule((_GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _WordRule((r"\p{N}", _GPT2))
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
        _WordRule((_LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    "smaug-bpe": _WordRule((_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _WordRule((_QWEN2,))),
    "tekken": _WordRule((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-coder": _WordRule(_DEEPSEEK_CODER),
}


def load_tokenizer(path: Path) -> TokenizerFiles:
    """The tokenizer of the GGUF file at ``path``. Raises ``ModelError`` where it is broken or of an unknown kind."""
    metadata = Metadata(path)
    kind, tokens = metadata["tokenizer.ggml.model"], metadata.tokens
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelError(f"{path}: {len(tokens)} tokens, {len(set(tokens))} of them different, with {len(types)} types")
    try:
        if kind == "gpt2":
            tokenizer, adds_bos = _byte_level(metadata)
        elif kind == "llama":
            tokenizer, adds_bos = _sentencepiece(metadata, types)
        else:
            raise ModelError(f"GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama")
    except ModelError as error:
        raise ModelError(
            f"{path}: {error}. A Hugging Face folder of the same model carries its own tokenizer.json"
        ) from error
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelError(f"{path}: the tokenizer cannot be built from its metadata: {error}") from error
    special = [kind in (_CONTROL, _UNKNOWN) or token in END_TOKENS for token, kind in zip(tokens, types, strict=True)]
    tokenizer.add_tokens(
        [
            AddedToken(token, special=is_special, normalized=False)
            for token, kind, is_special in zip(tokens, types, special, strict=True)
            if is_special or kind == _USER_DEFINED
        ]
    )

    def named(name: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ModelError(f"{path}: its {name} token has the id {token_id}, and there are {len(tokens)} tokens")
        return None if token_id is None else tokens[token_id]

    bos = named("bos")
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=bos,
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        eos_token_ids=end_token_ids(metadata),
    )


def _byte_level(metadata: Metadata) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, and whether texts begin with BOS where the file does not say."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    rule = _RULES.get(pre)
    if rule is None:
        raise ModelError(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {', '.join(sorted(_RULES))}")
    vocabulary = {token: index for index, token in enumerate(metadata.tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.ignore_merges))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.adds_bos


def _sentencepiece(metadata: Metadata, types: list[int]) -> tuple[Tokenizer, bool]:
    """A SentencePiece BPE (Llama 2, Mistral): it joins the two neighbours that make the token of highest score.

    The library's BPE ranks pairs where SentencePiece ranks what they make. The two agree as long as no two tokens have
    one score.
    """
    tokens, scores = metadata.tokens, metadata["tokenizer.ggml.scores"]
    if len(scores) != len(tokens):
        raise ModelError(f"{len(tokens)} tokens with {len(scores)} scores")
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise ModelError("a tokenizer that takes spaces away is not supported")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if missing := [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]:
        raise ModelError(f"the vocabulary lacks a token for {len(missing)} of 256 bytes, first <0x{missing[0]:02X}>")
    pieces = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    ranked = sorted((one for one in pieces if len(one) > 1), key=lambda one: -pieces[one])
    merges, seen = [], set[float]()
    for token in ranked:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in pieces and right in pieces]
        if pairs and pieces[token] in seen:
            raise ModelError(f"several tokens have the score {pieces[token]:g}, one of them {token!r}")
        if pairs:
            seen.add(pieces[token])
            merges += pairs
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        strip = [decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.normalizer, strip = space, []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True
