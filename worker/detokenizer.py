"""From token ids back to text, one token at a time.

Every token stands for bytes. They are joined and decoded as UTF-8 by an incremental decoder, so a character whose
bytes come in several tokens appears when it is whole, a byte that can belong to none becomes U+FFFD, and each token
costs the same however long the answer is. Text that may still turn out to be the beginning of a stop string is held
back. The result does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenTable:
    """The bytes of each token of one model.

    ``token_bytes[i]`` is what token ``i`` stands for; empty where the vocabulary has no such token. ``special`` tokens
    (end of text, roles) have their name as bytes and are left out of an answer's text.
    """

    __slots__ = ("special", "token_bytes")

    def __init__(self, token_bytes: Sequence[bytes], special: Iterable[int] = ()) -> None:
        self.token_bytes = token_bytes
        self.special = frozenset(special)

    @classmethod
    def from_tokenizer_json(cls, tokenizer_json: str) -> TokenTable:
        """Read it from the tokenizers library's own format.

        Understands byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM) and those of SentencePiece (Llama 2,
        Mistral). Raises ``ValueError`` for any other decoder, naming it.
        """
        spec = json.loads(tokenizer_json)
        kinds = _decoder_kinds(spec.get("decoder"))
        if "ByteLevel" in kinds:
            to_bytes = _byte_level_bytes
        elif kinds & {"ByteFallback", "Metaspace"}:
            to_bytes = _sentencepiece_bytes
        else:
            raise ValueError(
                f"tokenizer decoder {sorted(kinds) or None} is not supported; supported: ByteLevel, "
                "ByteFallback, Metaspace"
            )
        vocabulary = spec["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of ids
            vocabulary = {token: index for index, (token, _score) in enumerate(vocabulary)}
        added = spec.get("added_tokens", ())
        size = 1 + max([*vocabulary.values(), *(token["id"] for token in added)], default=-1)
        token_bytes = [b""] * size
        for token, index in vocabulary.items():
            token_bytes[index] = to_bytes(token)
        for token in added:
            token_bytes[token["id"]] = token["content"].encode() if token["special"] else to_bytes(token["content"])
        return cls(token_bytes, (token["id"] for token in added if token["special"]))

    def bytes_of(self, token_id: int) -> bytes:
        """What the token stands for, which may be half a character."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def text_of(self, token_id: int) -> str:
        """The token alone as text; bytes that are no whole character become U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")


class Detokenizer:
    """The text of one answer, as it grows.

    ``stop_string`` is set once a stop string has appeared; the text ends before it. Of several the one that is
    complete first counts, and of those that end together the longest.
    """

    __slots__ = ("_decode", "_held", "_stops", "_table", "stop_string")

    def __init__(self, table: TokenTable, stop_strings: Iterable[str] = ()) -> None:
        self._table = table
        self._decode = _Utf8Decoder(errors="replace").decode
        self._stops = [_StopMatcher(stop) for stop in stop_strings]
        self._held = ""
        self.stop_string: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take one token; the text that is certain now. ``may_stop`` false: a stop string does not count yet."""
        if token_id in self._table.special:
            return ""
        text: str = self._decode(self._table.bytes_of(token_id))
        return self._check_stops(text, may_stop) if self._stops else text

    def finish(self) -> str:
        """The answer ends here: the text held back so far. An unfinished last character is left out."""
        held, self._held = self._held, ""
        return held

    def _check_stops(self, text: str, may_stop: bool) -> str:
        held_before = len(self._held)
        text = self._held + text
        for end in range(held_before, len(text)):
            char = text[end]
            complete = [stop for stop in self._stops if stop.advance(char)]
            if complete and may_stop:
                self.stop_string = max((stop.string for stop in complete), key=len)
                self._held = ""
                return text[: end + 1 - len(self.stop_string)]
        certain = len(text) - max(stop.num_matched for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]


class _StopMatcher:
    """Looks for one string in a stream of characters, in constant time per character (Knuth, Morris, Pratt)."""

    __slots__ = ("_fallback", "num_matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0  # characters of the string that the stream ends in
        self._fallback = [0] * len(string)  # to which shorter match a mismatch falls back
        length = 0
        for index in range(1, len(string)):
            while length and string[index] != string[length]:
                length = self._fallback[length - 1]
            length += string[index] == string[length]
            self._fallback[index] = length

    def advance(self, char: str) -> bool:
        """Take one character; whether the string is complete with it."""
        length = self.num_matched
        while length and self.string[length] != char:
            length = self._fallback[length - 1]
        length += self.string[length] == char
        complete = length == len(self.string)
        self.num_matched = self._fallback[length - 1] if complete else length
        return complete


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {kind for part in decoder["decoders"] for kind in _decoder_kinds(part)}
    return {decoder["type"]}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_FALLBACK.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
