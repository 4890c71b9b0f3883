"""Text to token ids with the pieces between special tokens cached, so that a conversation's next turn costs its news.

The tokenizer itself cuts a text at its added tokens before anything else, and encodes what lies between them piece by
piece. So the encoding of a whole is that of its pieces, joined, and a piece that was seen before need not be encoded
again. That does not hold for tokenizers that treat the first piece otherwise, or whose added tokens reach over their
borders (strip spaces, need whole words, match normalised text): those encode every text whole. What a new piece has
is mostly words that were seen before (``router.words``).
"""

import asyncio
import json
import re
import sys
from array import array
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from tokenizers import Tokenizer

from router.words import MAX_WORDS, WordCache, are_words_exact, text_of, words_of

# Below so many characters a thread costs more than the encoding itself (2 us per character at worst).
_INLINE_CHARS = 1_000
_CHARS_AT_ONCE = 4_000  # 1 ms at worst
_MAX_NEWS = 64  # words of a part of a text that are mostly new
_MAX_CACHED_BYTES = 64 << 20
_ENTRY_BYTES = 300  # of Python's own per cached piece


class SegmentedEncoder:
    """Encodes for one model. ``num_hits`` counts the tokens that were found in the cache."""

    def __init__(
        self, tokenizer_json: str, max_cached_bytes: int = _MAX_CACHED_BYTES, max_words: int = MAX_WORDS
    ) -> None:
        self.num_hits = 0
        self._tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)  # a text has as many or fewer
        spec = json.loads(tokenizer_json)
        self._special = _separable_tokens(spec)
        longest_first = sorted(self._special, key=len, reverse=True)
        self._border = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        stands_alone = self._border is not None or not spec.get("added_tokens")  # a piece, with no added token in it
        self._words = WordCache(max_words) if stands_alone and are_words_exact(spec) else None
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._cached_bytes = 0
        self._max_cached_bytes = max_cached_bytes
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def token_to_id(self, token: str) -> int | None:
        """The id of one token; None where the vocabulary has no such token."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    async def encode(self, text: str) -> bytes:
        """The ids of ``text`` as packed little-endian uint32, special tokens in it included, none added."""
        pieces = self._border.split(text) if self._border is not None else [text]
        parts: list[bytes] = []
        missing: dict[str, list[int]] = {}  # piece -> where it stands
        for number, piece in enumerate(pieces):
            if number % 2:
                parts.append(self._special[piece])
                continue
            known = self._cache.get(piece) if piece else b""
            if known is None:
                missing.setdefault(piece, []).append(number)
                known = b""
            elif piece:
                self._cache.move_to_end(piece)
                self.num_hits += len(known) // 4
            parts.append(known)
        if missing:
            encoded = await self._encode_all(list(missing))
            for (piece, places), ids in zip(missing.items(), encoded, strict=True):
                self._remember(piece, ids)
                for place in places:
                    parts[place] = ids
        return b"".join(parts)

    def close(self) -> None:
        """End the encoding thread."""
        self._threads.shutdown(wait=False)

    async def _encode_all(self, pieces: list[str]) -> list[bytes]:
        if self._words is None:
            return await self._encode_each(pieces)
        encoded, num_chars = [], 0
        for piece in pieces:
            if num_chars > _CHARS_AT_ONCE:
                await asyncio.sleep(0)  # many pieces: others have their turn in between
                num_chars = 0
            encoded.append(await self._encode_words(self._words, piece))
            num_chars += len(piece)
        return encoded

    async def _encode_words(self, cache: WordCache, text: str) -> bytes:
        parts: list[bytes] = []
        for words in words_of(text):
            if parts:
                await asyncio.sleep(0)  # a long text: others have their turn in between
            known = cache.look_up(words)
            if None not in known:
                parts += cast("list[bytes]", known)
                continue
            news = list({word for word, ids in zip(words, known, strict=True) if ids is None})
            if len(news) > _MAX_NEWS and 2 * len(news) > len(words):  # a word alone is twice as dear as in its text
                del news[_MAX_NEWS:]
                whole, *encoded = await self._encode_each(["".join(map(text_of, words)), *map(text_of, news)])
                parts.append(whole)
            else:
                encoded = await self._encode_each([text_of(word) for word in news])
                found = dict(zip(news, encoded, strict=True))
                parts += [found[word] if ids is None else ids for word, ids in zip(words, known, strict=True)]
            cache.learn(news, encoded)
        return b"".join(parts)

    async def _encode_each(self, pieces: list[str]) -> list[bytes]:
        if sum(map(len, pieces)) <= _INLINE_CHARS:
            return self._encode_now(pieces)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode_in_thread, pieces)

    def _encode_now(self, pieces: list[str]) -> list[bytes]:
        return [pack_ids(self._tokenizer.encode(piece, add_special_tokens=False).ids) for piece in pieces]

    def _encode_in_thread(self, pieces: list[str]) -> list[bytes]:
        # A single ``encode`` keeps the interpreter lock all along, seconds for a megabyte; a batch gives it back.
        encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return [pack_ids(one.ids) for one in encodings]

    def _remember(self, piece: str, ids: bytes) -> None:
        size = sys.getsizeof(piece) + len(ids) + _ENTRY_BYTES
        if self._border is None or piece in self._cache or size > self._max_cached_bytes // 4:
            return
        self._cache[piece] = ids
        self._cached_bytes += size
        while self._cached_bytes > self._max_cached_bytes:
            old, old_ids = self._cache.popitem(last=False)
            self._cached_bytes -= sys.getsizeof(old) + len(old_ids) + _ENTRY_BYTES


def _separable_tokens(spec: dict[str, Any]) -> dict[str, bytes]:
    """The added tokens at which any text may be cut, with their packed ids; none where a cut could change the rest."""
    added = spec.get("added_tokens") or []
    if any(one["lstrip"] or one["rstrip"] or one["single_word"] or one["normalized"] for one in added):
        return {}
    if _treats_the_first_piece_otherwise(spec.get("normalizer")) or _treats_the_first_piece_otherwise(
        spec.get("pre_tokenizer")
    ):
        return {}
    return {one["content"]: pack_ids([one["id"]]) for one in added}


def _treats_the_first_piece_otherwise(part: dict[str, Any] | None) -> bool:
    if part is None:
        return False
    if part["type"] == "Sequence":
        inner = part.get("pretokenizers") or part.get("normalizers") or []
        return any(map(_treats_the_first_piece_otherwise, inner))
    return bool(part["type"] == "Metaspace" and part.get("prepend_scheme", "first") == "first")


def pack_ids(token_ids: list[int]) -> bytes:
    """Little-endian uint32."""
    packed = array("I", token_ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of ``pack_ids``."""
    packed = array("I", data)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tolist()
