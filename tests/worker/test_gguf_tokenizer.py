"""Tokenizers rebuilt from GGUF metadata cut text as the models that the files come from do."""

import itertools
import random
from pathlib import Path
from typing import Any

import gguf
import pytest

from worker.loading.tokenizer import TokenizerFiles, load_tokenizer
from worker.models.config import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_letters() -> list[str]:
    """The letters that stand for the 256 bytes in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = itertools.count(256)
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def write(path: Path, model: str, tokens: list[str], **more: Any) -> Path:
    """A file with a vocabulary and nothing else. Keys of ``more`` are those of llama.cpp under ``tokenizer.ggml``."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in more.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
            add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(
    path: Path, pre: str, tokens: tuple[str, ...] = (), merges: tuple[str, ...] = ("a b",), **more: Any
) -> Path:
    """The 256 bytes, what the one merge makes (256), and ``tokens`` from 257 on."""
    kept = [*byte_letters(), "ab", *tokens]
    return write(path / "model.gguf", "gpt2", kept, pre=pre, merges=list(merges), **more)


def words(files: TokenizerFiles, text: str) -> list[str]:
    """``text`` as it is cut before anything is merged, in plain letters."""
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    cut = files.tokenizer().pre_tokenizer.pre_tokenize_str(text)
    return [bytes(letters[letter] for letter in word).decode() for word, _ in cut]


TEXT = "It's  CamelCase IT'S 12345, x²+y!?\n\n né"
CUTS = {
    "gpt-2": "It|'s| | CamelCase| IT|'|S| 12345|,| x|²|+|y|!?|\n\n| né",
    "smollm": "It|'s| | CamelCase| IT|'|S| |1|2|3|4|5|,| x|²|+|y|!?|\n\n| né",
    "llama-bpe": "It|'s| | CamelCase| IT|'S| |123|45|,| x|²|+y|!?\n\n| né",
    "qwen2": "It|'s| | CamelCase| IT|'S| |1|2|3|4|5|,| x|²|+y|!?\n\n| né",
    "tekken": "It|'s| | Camel|Case| IT|'S| |1|2|3|4|5|,| x|²|+y|!?\n\n| né",
    "deepseek-coder": "It|'|s| | CamelCase| IT|'|S| |1|2|3|4|5|,| x|²|+|y|!?|\n|\n| né",
    "default": "It|'|s| | CamelCase| IT|'|S| |123|45|,| x|²|+|y|!?|\n\n| né",
}
SAME = {
    "gpt-2": ["mpt", "olmo", "trillion"],
    "smollm": ["starcoder", "refact", "command-r", "codeshell", "minerva-7b"],
    "llama-bpe": ["llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe"],
    "qwen2": ["deepseek-r1-qwen", "megrez"],
}


@pytest.mark.parametrize(("pre", "like"), [(name, like) for like in CUTS for name in (like, *SAME.get(like, ()))])
def test_each_pre_tokenizer_cuts_words_by_its_own_rule(tmp_path: Path, pre: str, like: str) -> None:
    files = load_tokenizer(byte_level(tmp_path, pre, add_bos_token=False))
    assert "|".join(words(files, TEXT)) == CUTS[like]
    ids = files.tokenizer().encode(TEXT, add_special_tokens=False).ids
    assert files.tokenizer().decode(ids) == TEXT


def test_an_unknown_pre_tokenizer_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"pre-tokenizer 'kimi-k2' is not supported; supported: .*llama-bpe.*own token"
    ):
        load_tokenizer(byte_level(tmp_path, "kimi-k2"))
    with pytest.raises(ModelError, match=r"tokenizer 'bert' is not supported; supported: gpt2, llama"):
        load_tokenizer(write(tmp_path / "bert.gguf", "bert", ["a"]))


@pytest.mark.parametrize(
    ("pre", "ids"), [("llama-bpe", [258]), ("tekken", [258]), ("qwen2", [256, 99]), ("smaug-bpe", [256, 99])]
)
def test_llama_3_takes_a_word_of_its_vocabulary_whole_whatever_the_merges_say(
    tmp_path: Path, pre: str, ids: list[int]
) -> None:
    files = load_tokenizer(
        byte_level(tmp_path, pre, ("bc", "abc"), bos_token_id=0)  # no merge makes abc
    )
    assert files.tokenizer().encode("abc", add_special_tokens=False).ids == ids


@pytest.mark.parametrize(
    ("pre", "said", "begins"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("default", None, False),
        ("smaug-bpe", None, False),
    ],
)
def test_texts_begin_with_bos_where_the_file_or_else_the_kind_says(
    tmp_path: Path, pre: str, said: bool | None, begins: bool
) -> None:
    more = {} if said is None else {"add_bos_token": said}
    types = [NORMAL] * 257 + [CONTROL]
    files = load_tokenizer(byte_level(tmp_path, pre, ("<|begin|>",), token_type=types, bos_token_id=257, **more))
    assert files.tokenizer().encode("a").ids == ([257, 97] if begins else [97])
    assert files.tokenizer().encode("a", add_special_tokens=False).ids == [97]
    assert files.tokenizer().encode("<|begin|>a", add_special_tokens=False).ids == [257, 97]


def test_a_bos_that_is_wanted_and_not_named_is_missed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks 'tokenizer\.ggml\.bos_token_id'"):
        load_tokenizer(byte_level(tmp_path, "llama-bpe"))


def test_answers_end_at_the_named_tokens_and_at_those_known_by_their_text(tmp_path: Path) -> None:
    tokens = ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
    types = [NORMAL] * 257 + [CONTROL, NORMAL, CONTROL, CONTROL]  # a converter that forgot one
    path = byte_level(tmp_path, "llama3", tokens, token_type=types, eos_token_id=258, bos_token_id=0)
    files = load_tokenizer(path)
    assert files.eos_token_ids == (258, 257, 259)
    assert files.tokenizer().encode("a<|eot_id|>", add_special_tokens=False).ids == [97, 258]
    assert files.tokenizer().decode([97, 258]) == "a"


def test_broken_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="258 tokens, 257 of them different"):
        load_tokenizer(byte_level(tmp_path, "qwen2", ("a",)))
    with pytest.raises(ModelError, match=r"257 tokens.* with 3 types"):
        load_tokenizer(byte_level(tmp_path, "qwen2", token_type=[NORMAL] * 3))
    with pytest.raises(ModelError, match="cannot be built from its metadata"):
        load_tokenizer(byte_level(tmp_path, "qwen2", merges=("a nowhere",)))
    with pytest.raises(ModelError, match="its bos token has the id 300"):
        load_tokenizer(byte_level(tmp_path, "qwen2", bos_token_id=300))


# SentencePiece


def pieces() -> tuple[list[str], list[float], list[int]]:
    """A vocabulary as SentencePiece trains it: specials, bytes, then what was merged first to last, then letters."""
    merged = ["▁▁", "aa", "▁a", "ab", "aab", "ba", "▁ab", "▁▁▁▁", "abab", "▁aab", "bab", "aaaa", "né", "▁né", "▁▁a"]
    letters = ["▁", "a", "b", "n", "é", ","]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters, "<tool>"]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(letters))] + [-1000.0]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(merged) + len(letters)) + [USER_DEFINED]
    return tokens, scores, types


def sentencepiece(path: Path, **more: Any) -> Path:
    tokens, scores, types = pieces()
    given = {"scores": scores, "token_type": types, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | more
    return write(path / "model.gguf", "llama", tokens, **given)


def by_definition(text: str) -> list[str]:
    """SentencePiece's BPE: of all neighbours that make a piece, the one of highest score, leftmost first, is joined."""
    tokens, scores, types = pieces()
    score_of = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(score_of.get(left + right), -at) for at, (left, right) in enumerate(itertools.pairwise(parts))]
        best = max((one for one in pairs if one[0] is not None), default=None)
        if best is None:
            break
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        piece for part in parts for piece in ([part] if part in score_of else [f"<0x{b:02X}>" for b in part.encode()])
    ]


def test_a_sentencepiece_vocabulary_joins_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    files = load_tokenizer(sentencepiece(tmp_path))
    tokenizer, rng = files.tokenizer(), random.Random(4)
    tokens = pieces()[0]
    for _ in range(2000):
        text = "".join(rng.choices("aab né,", k=rng.randrange(1, 24))) + rng.choice(["", "", "ü", "漢"])
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert [tokens[index] for index in encoding.ids] == by_definition(text), text
        assert tokenizer.decode(encoding.ids) == text


def test_a_sentencepiece_text_begins_with_bos_and_a_space_and_anew_after_each_special_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece(tmp_path)).tokenizer()
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    assert tokenizer.encode("ab</s>ab", add_special_tokens=False).tokens == ["▁ab", "</s>", "▁ab"]
    assert tokenizer.encode("ab<tool>", add_special_tokens=False).tokens == ["▁ab", "<tool>"]
    bare = load_tokenizer(sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)).tokenizer()
    assert bare.encode("ab").tokens == ["ab"]


def test_sentencepiece_vocabularies_that_cannot_be_rebuilt_exactly_are_refused(tmp_path: Path) -> None:
    tokens, scores, types = pieces()
    with pytest.raises(ModelError, match="several tokens have the score 0"):
        load_tokenizer(sentencepiece(tmp_path, scores=[0.0] * len(tokens)))
    with pytest.raises(ModelError, match="takes spaces away"):
        load_tokenizer(sentencepiece(tmp_path, remove_extra_whitespaces=True))
    with pytest.raises(ModelError, match=rf"{len(tokens)} tokens with 3 scores"):
        load_tokenizer(sentencepiece(tmp_path, scores=scores[:3]))
    with pytest.raises(ModelError, match=r"lacks a token for 1 of 256 bytes, first <0x41>"):
        tokens[tokens.index("<0x41>")] = "<byte>"
        load_tokenizer(write(tmp_path / "bytes.gguf", "llama", tokens, scores=scores, token_type=types))
