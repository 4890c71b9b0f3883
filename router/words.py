"""Text to token ids word by word, where that is known to be exact: words come again, whatever the text.

Most tokenizers cut a text by a regular expression before they look for tokens, and no token reaches over a cut. Under
the expressions named here there is a cut before every space that follows a letter, a digit or ASCII punctuation: no
alternative of theirs goes on from something else to white space, and none looks behind. Between two such cuts a text
is encoded as if it stood alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

_CUT = re.compile(r" (?<=[\w!-~] )(?=\S)")
_CHARS_AT_ONCE = 16_384  # half a millisecond
MAX_WORDS = 1 << 16  # 9 MB of usual ones
_MAX_WORD_CHARS = 48

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERNS = (
    rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",  # GPT-2, SmolLM2
    rf"(?i:{_CONTRACTIONS})|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACE}",  # Llama 3
    rf"(?i:{_CONTRACTIONS})|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACE}",  # Qwen 2 and 3
    rf"{_CASED}*{_SMALL}+|{_CASED}+{_SMALL}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACE}",  # Mistral's Tekken
)
_DIGIT_PATTERNS = (r"\p{N}", r"\p{N}{1,3}")  # before one of the others: they cut nowhere else


class WordCache:
    """The ids of words that were seen before. When it is full it starts afresh: what is common is soon back."""

    def __init__(self, max_words: int = MAX_WORDS) -> None:
        self._ids: dict[str, bytes] = {}
        self._max_words = max_words

    def look_up(self, words: list[str]) -> list[bytes | None]:
        """The ids of each; None where it was not seen."""
        return list(map(self._ids.get, words))

    def learn(self, words: Iterable[str], ids: Iterable[bytes]) -> None:
        """Keep what was encoded."""
        found = {word: one for word, one in zip(words, ids, strict=True) if len(word) <= _MAX_WORD_CHARS}
        if len(self._ids) + len(found) > self._max_words:
            self._ids.clear()
        self._ids.update(found)


def words_of(text: str) -> Iterator[list[str]]:
    """The words of a text, so many at a time that others can have their turn in between.

    Each comes without the space before it. The first, which has none, comes with one, so that it is no other's equal.
    """
    start, lead = 0, " "
    while True:
        cut = _CUT.search(text, start + _CHARS_AT_ONCE)
        words = _CUT.split(text[start : cut.start() if cut is not None else len(text)])
        words[0] = lead + words[0]
        yield words
        if cut is None:
            return
        start, lead = cut.end(), ""


def text_of(word: str) -> str:
    """As it stands in its text."""
    return word[1:] if word.startswith(" ") else " " + word


def are_words_exact(spec: dict[str, Any]) -> bool:
    """Whether a tokenizer (its JSON) encodes any text as its words one by one."""
    model, normalizer = spec["model"], spec.get("normalizer")
    return (
        model["type"] == "BPE"
        and not model.get("dropout")
        and (normalizer is None or normalizer["type"] == "NFC")  # which composes no space, and nothing with one
        and _cuts_at_words(spec.get("pre_tokenizer"))
    )


def _cuts_at_words(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    does_cut = False
    for step in steps:
        match step:
            case {"type": "Digits"}:
                pass
            case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
                if regex not in WORD_PATTERNS and regex not in _DIGIT_PATTERNS:
                    return False
                does_cut |= regex in WORD_PATTERNS
            case {"type": "ByteLevel", "add_prefix_space": False}:
                does_cut |= step.get("use_regex", True)  # GPT-2's
            case _:
                return False
    return does_cut
