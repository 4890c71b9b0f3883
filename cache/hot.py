"""Hot prefixes: which fronts of prompts save a fleet the most prefill, and what a new replica should compute first.

A served request credits one prefix: the blocks that its replica did not compute again. Where a match ends is where
prompts part, so what many sessions share (a system prompt) gathers many hits at its own end, while a conversation
gets one per turn at an ever deeper end. A block's value is the number of requests that would hit it: the hits at the
end of its prefix and of all prefixes that extend it. So no prefix counts twice, values never rise along a prefix, and
taking prefixes in order of value takes whole fronts.

Hits are halved per ``HALF_LIFE_S``. The clock is an argument everywhere.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

HALF_LIFE_S = 600.0
MAX_PREFIXES = 1024  # in what one router publishes
MAX_TOKENS = 1 << 20  # in what all routers publish together; 4 bytes each

_VERSION = 1
_HEAD = struct.Struct("<BQII")  # version, milliseconds, bytes of the tokenizer's name, number of prefixes
_PREFIX = struct.Struct("<IdIHH")  # parent + 1, hits, bytes of token ids, of the adapter's name, of the salt
_MAX_DECODED_BYTES = 1 << 28


class HotDecodeError(ValueError):
    """Bytes that are no set of hot prefixes."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """The front of some prompts, in whole blocks, and how many requests' match ended there."""

    token_ids: bytes  # little-endian uint32 each
    hits: float
    lora: str = ""  # an adapter's identity (``cache.adapter``) as text
    cache_salt: str = ""

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return len(self.token_ids) // 4


@dataclass(frozen=True, slots=True)
class Ranked:
    """A prefix in its place in the order of value."""

    prefix: HotPrefix  # its hits include those of prefixes beyond it that found no room
    parent: int  # where its longest front stands in the same order, before it; -1: it has none there
    num_new_tokens: int  # those after that front
    value: float  # requests that would hit its last block

    @property
    def saved_tokens(self) -> float:
        """Prefill tokens that its own part would save."""
        return self.value * self.num_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSet:
    """What one router has published."""

    written_ms: int  # on Redis' clock
    tokenizer: str  # fingerprint: ids of another tokenizer mean other text
    prefixes: tuple[HotPrefix, ...]


def halved(hits: float, age_s: float) -> float:
    """What is left of ``hits`` after so long."""
    return hits * math.exp2(-max(0.0, age_s) / HALF_LIFE_S)


def saved_tokens(prefixes: Iterable[HotPrefix]) -> float:
    """Prefill tokens that a replica would save which holds all of them."""
    return sum(one.hits * one.num_tokens for one in prefixes)


def by_value(prefixes: Sequence[HotPrefix], max_tokens: int, max_prefixes: int | None = None) -> list[Ranked]:
    """The most valuable of them that fit ``max_tokens`` together, fronts in common counted once, dearest first.

    A prefix comes after every one that it extends. Equal ones must have been merged (``merged``).
    """
    order = sorted(
        range(len(prefixes)), key=lambda i: (prefixes[i].lora, prefixes[i].cache_salt, prefixes[i].token_ids)
    )
    fronts = [-1] * len(prefixes)
    values = [one.hits for one in prefixes]
    above: list[int] = []  # the fronts of the prefix at hand, longest last
    for i in order:
        while above and not _extends(prefixes[i], prefixes[above[-1]]):
            above.pop()
        fronts[i] = above[-1] if above else -1
        for front in above:
            values[front] += prefixes[i].hits
        above.append(i)
    chosen: list[Ranked] = []
    places: dict[int, int] = {}
    extra_hits: dict[int, float] = {}
    room = max_tokens
    for i in sorted(order, key=lambda i: -values[i]):  # of equal ones the shorter first, as ``order`` has them
        front = fronts[i]
        while front >= 0 and front not in places:
            front = fronts[front]
        place = places[front] if front >= 0 else -1
        num_new = prefixes[i].num_tokens - (chosen[place].prefix.num_tokens if place >= 0 else 0)
        if num_new > room or (max_prefixes is not None and len(chosen) >= max_prefixes):
            if place >= 0:
                extra_hits[place] = extra_hits.get(place, 0.0) + prefixes[i].hits
            continue
        room -= num_new
        places[i] = len(chosen)
        chosen.append(Ranked(prefixes[i], place, num_new, values[i]))
    for place, hits in extra_hits.items():
        one = chosen[place]
        chosen[place] = replace(one, prefix=replace(one.prefix, hits=one.prefix.hits + hits))
    return chosen


def merged(sets: Iterable[HotSet], now_ms: int, max_age_s: float) -> list[HotPrefix]:
    """One list from what several routers saw; hits of a set are halved by its age, too old sets are left out."""
    hits: dict[tuple[str, str, bytes], float] = {}
    for one in sets:
        age_s = (now_ms - one.written_ms) / 1000
        if age_s > max_age_s:
            continue
        for prefix in one.prefixes:
            name = (prefix.lora, prefix.cache_salt, prefix.token_ids)
            hits[name] = hits.get(name, 0.0) + halved(prefix.hits, age_s)
    return [HotPrefix(token_ids, count, lora, salt) for (lora, salt, token_ids), count in hits.items()]


@dataclass(slots=True)
class _Entry:
    keys: array[int]
    token_ids: bytes
    hits: float
    at_s: float  # of the last hit, when ``hits`` was right


class HotTable:
    """The prefixes that requests of one router hit, bounded in number and bytes. Forgets the least hit first."""

    def __init__(self, max_prefixes: int = 2 * MAX_PREFIXES, max_bytes: int = 32 << 20) -> None:
        self._max_prefixes = max_prefixes
        self._max_bytes = max_bytes
        self._entries: dict[tuple[int, str, str], _Entry] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def credit(
        self,
        keys: array[int],
        token_ids: bytes,
        num_cached_tokens: int,
        block_size: int,
        now: float,
        lora: str = "",
        cache_salt: str = "",
    ) -> None:
        """A request with this prompt was served, and so many of its leading tokens were not computed.

        ``keys`` are the index keys of its full blocks. What does not fill a block is not counted.
        """
        depth = min(num_cached_tokens // block_size, len(keys))
        if depth < 1:
            return
        name = (keys[depth - 1], lora, cache_salt)
        entry = self._entries.get(name)
        if entry is not None:
            entry.hits = halved(entry.hits, now - entry.at_s) + 1
            entry.at_s = now
            return
        entry = self._entries[name] = _Entry(keys[:depth], token_ids[: 4 * depth * block_size], 1.0, now)
        self.num_bytes += len(entry.token_ids)
        if len(self._entries) > self._max_prefixes or self.num_bytes > self._max_bytes:
            self._forget_some(now)

    def prefixes(self, now: float, max_age_s: float) -> list[HotPrefix]:
        """All of them, with their hits as of ``now``; those without a hit for ``max_age_s`` are forgotten."""
        for name in [name for name, entry in self._entries.items() if now - entry.at_s > max_age_s]:
            self._drop(name)
        return [
            HotPrefix(entry.token_ids, halved(entry.hits, now - entry.at_s), lora, salt)
            for (_, lora, salt), entry in self._entries.items()
        ]

    def chains(self, now: float) -> list[tuple[array[int], float, str]]:
        """The index keys of every prefix, its hits as of ``now``, and its adapter."""
        return [
            (entry.keys, halved(entry.hits, now - entry.at_s), lora) for (_, lora, _), entry in self._entries.items()
        ]

    def check_invariants(self) -> None:
        """Raises ``AssertionError`` when bytes and entries do not agree."""
        assert self.num_bytes == sum(len(entry.token_ids) for entry in self._entries.values())
        assert len(self._entries) <= self._max_prefixes
        assert self.num_bytes <= self._max_bytes or len(self._entries) <= 1

    def _forget_some(self, now: float) -> None:
        """A quarter more than needed, so that this is rare."""
        names = sorted(self._entries, key=lambda name: halved(self._entries[name].hits, now - self._entries[name].at_s))
        for name in names:
            if len(self._entries) <= self._max_prefixes * 3 // 4 and self.num_bytes <= self._max_bytes * 3 // 4:
                break
            self._drop(name)

    def _drop(self, name: tuple[int, str, str]) -> None:
        self.num_bytes -= len(self._entries.pop(name).token_ids)


def encode_hot(ranked: Sequence[Ranked], written_ms: int, tokenizer: str) -> bytes:
    """The bytes of a router's hot prefixes. Each holds only the token ids after its front, which stands before it."""
    name = tokenizer.encode()
    parts = [_HEAD.pack(_VERSION, written_ms, len(name), len(ranked)), name]
    for one in ranked:
        prefix = one.prefix
        token_ids = prefix.token_ids[len(prefix.token_ids) - 4 * one.num_new_tokens :]
        lora, salt = prefix.lora.encode(), prefix.cache_salt.encode()
        parts += [
            _PREFIX.pack(one.parent + 1, prefix.hits, len(token_ids), len(lora), len(salt)),
            lora,
            salt,
            token_ids,
        ]
    return b"".join(parts)


def decode_hot(data: bytes) -> HotSet:
    """What ``encode_hot`` made. Raises ``HotDecodeError``."""
    try:
        version, written_ms, name_length, count = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise HotDecodeError(f"version {version} is not {_VERSION}")
        at = _HEAD.size + name_length
        tokenizer = data[_HEAD.size : at].decode()
        prefixes: list[HotPrefix] = []
        left = _MAX_DECODED_BYTES
        for _ in range(count):
            parent, hits, num_bytes, lora_length, salt_length = _PREFIX.unpack_from(data, at)
            at += _PREFIX.size
            ends = (at + lora_length, at + lora_length + salt_length, at + lora_length + salt_length + num_bytes)
            front = prefixes[parent - 1].token_ids if parent else b""
            left -= len(front) + num_bytes
            if ends[2] > len(data) or parent > len(prefixes) or num_bytes % 4 or not 0 <= hits < 1e15 or left < 0:
                raise HotDecodeError("a prefix is cut off or makes no sense")
            lora, salt = data[at : ends[0]].decode(), data[ends[0] : ends[1]].decode()
            prefixes.append(HotPrefix(front + data[ends[1] : ends[2]], hits, lora, salt))
            at = ends[2]
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise HotDecodeError(f"{type(error).__name__}: {error}") from None
    if at != len(data):
        raise HotDecodeError(f"{len(data) - at} bytes too many")
    return HotSet(written_ms=written_ms, tokenizer=tokenizer, prefixes=tuple(prefixes))


def _extends(prefix: HotPrefix, front: HotPrefix) -> bool:
    same = prefix.lora == front.lora and prefix.cache_salt == front.cache_salt
    return same and prefix.token_ids.startswith(front.token_ids)
