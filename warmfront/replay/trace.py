"""Request traces: two formats of JSON lines, read into one.

Ours has ``timestamp_ms, session, output_tokens`` and the prompt as ``token_ids``, ``text`` or ``messages``; with
``output_token_ids`` the answer stays in the cache as it does in life. Mooncake's (kvcache-ai/Mooncake, FAST'25) has
``timestamp, input_length, output_length, hash_ids``: each id names a block of 512 tokens and all before it, the last
one is partial unless the length divides. Its answers have no ids: they take room while they are made and leave nothing.
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.block_hash import BlockChain, BlockHash, HashScheme, TokenIds, pack_keys
from warmfront.errors import WrongUse
from warmfront.files import fault_of

MOONCAKE_BLOCK_SIZE = 512
_LAST_GAP_S = 3.0  # of a Mooncake trace, whose clock ticks every 3 s: how long its last tick lasts
_NAME_BYTES = 8
_MOST_TOKENS = 1 << 24  # of one prompt or answer; each block of it is named
_OURS = '{"timestamp_ms": 0, "token_ids": [1, 2], "output_tokens": 20}'
_MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]}'
_nobodys_numbers = itertools.count(1 << 63)

Encode: TypeAlias = Callable[[dict[str, Any]], "array[int]"]
"""From a line with ``text`` or ``messages`` to token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a trace. Its prompt is ``token_ids``, or ``hash_ids`` of 512-token blocks where it has none."""

    at_s: float
    session: str  # turns of one session follow one another; alone in its own where the trace names none
    num_tokens: int
    num_output_tokens: int  # at least 1
    token_ids: array[int] | None = None  # typecode "i"
    output_token_ids: array[int] | None = None
    hash_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A turn whose blocks have names. ``keys`` are those of the prompt's full blocks."""

    turn: Turn
    keys: array[int]
    all_hashes: Sequence[BlockHash]  # of the answer's blocks too, where its tokens are known
    all_keys: array[int]

    def chain(self, scheme: HashScheme) -> NamedChain:
        """The prompt as a cache takes it."""
        return NamedChain(scheme, self)


class NamedChain(BlockChain):
    """A chain whose names were made before: it grows by counting. Its ``token_ids`` only have the right number."""

    __slots__ = ("_job", "_num_tokens")
    token_ids: Sequence[int]  # type: ignore[assignment]

    def __init__(self, scheme: HashScheme, job: Job) -> None:
        super().__init__(scheme, ())
        self._job = job
        self._num_tokens = job.turn.num_tokens
        self.token_ids = range(self._num_tokens)
        self.hashes = list(job.all_hashes[: len(job.keys)])
        self.keys = job.keys[:]

    def __len__(self) -> int:
        return self._num_tokens

    def extend(self, token_ids: TokenIds) -> None:
        """Append ``len(token_ids)`` tokens, whatever they are."""
        if not len(token_ids):
            return
        start = len(self.hashes)
        self._num_tokens += len(token_ids)
        self.token_ids = range(self._num_tokens)
        end = self._num_tokens // self.scheme.block_size
        self.hashes += self._job.all_hashes[start:end]
        self.keys += self._job.all_keys[start:end]
        num_nameless = end - len(self.hashes)
        if num_nameless > 0:  # of an answer whose tokens nobody knows
            names = _names(np.fromiter(_nobodys_numbers, dtype=np.uint64, count=num_nameless))
            self.hashes += names
            self.keys += pack_keys(names)


def read_trace(path: Path, encode: Encode | None = None, limit: int | None = None) -> list[Turn]:
    """The first ``limit`` turns of a trace in order of time. Raises ``WrongUse`` naming the line at fault.

    ``encode`` is needed where prompts are text.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            turns = list(_read_lines(lines, path, encode, limit))
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUse(f"{path}: {fault_of(error)}") from error
    if not turns:
        raise WrongUse(f"{path} holds no request; a line of it: {_OURS}")
    turns.sort(key=lambda turn: turn.at_s)
    return _spread(turns) if turns[0].hash_ids else turns


def name_blocks(turns: Iterable[Turn], scheme: HashScheme) -> list[Job]:
    """Each turn with the names of its blocks. Raises ``WrongUse`` for a block size that does not divide Mooncake's."""
    if MOONCAKE_BLOCK_SIZE % scheme.block_size and any(turn.hash_ids for turn in turns):
        raise WrongUse(
            f"--block-size {scheme.block_size}: this trace knows blocks of {MOONCAKE_BLOCK_SIZE} tokens, "
            "which that does not divide"
        )
    return [_name(turn, scheme) for turn in turns]


def _read_lines(lines: Iterable[str], path: Path, encode: Encode | None, limit: int | None) -> Iterator[Turn]:
    num_read = 0
    for number, line in enumerate(lines, start=1):
        if limit is not None and num_read == limit:
            return
        if not line.strip():
            continue
        expected = _OURS
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("no object")
            if "hash_ids" in entry:
                expected = _MOONCAKE
                turn = _mooncake(entry, number)
            else:
                turn = _ours(entry, number, encode)
        except (ValueError, KeyError, OverflowError) as error:
            raise WrongUse(f"{path} line {number}: {fault_of(error)}; expected {expected}") from error
        num_read += 1
        yield turn


def _ours(entry: dict[str, Any], number: int, encode: Encode | None) -> Turn:
    if "token_ids" in entry:
        token_ids = _ids(entry, "token_ids", "i")
    elif "text" in entry or "messages" in entry:
        if not _is_text(entry):
            raise ValueError("text is a string, messages are objects with role and content")
        if encode is None:
            raise ValueError("its prompt is text, and there is no tokenizer")
        token_ids = encode(entry)
    else:
        raise ValueError("none of token_ids, text, messages and hash_ids is there")
    if not token_ids:
        raise ValueError("the prompt is empty")
    output = _ids(entry, "output_token_ids", "i") if "output_token_ids" in entry else None
    num_output = len(output) if output is not None else _count(entry, "output_tokens")
    return Turn(
        at_s=_seconds(entry, "timestamp_ms"),
        session=str(entry.get("session", f"line {number}")),
        num_tokens=len(token_ids),
        num_output_tokens=max(1, num_output),
        token_ids=token_ids,
        output_token_ids=output or None,
    )


def _mooncake(entry: dict[str, Any], number: int) -> Turn:
    hash_ids, num_tokens = _ids(entry, "hash_ids", "Q"), _count(entry, "input_length")
    if num_tokens < 1 or len(hash_ids) != -(-num_tokens // MOONCAKE_BLOCK_SIZE):
        raise ValueError(f"{len(hash_ids)} hash_ids for {num_tokens} tokens")
    return Turn(
        at_s=_seconds(entry, "timestamp"),
        session=f"line {number}",
        num_tokens=num_tokens,
        num_output_tokens=max(1, _count(entry, "output_length")),
        hash_ids=hash_ids,
    )


def _ids(entry: dict[str, Any], name: str, typecode: Literal["i", "Q"]) -> array[int]:
    """A field that is a list of ids, none below 0. Raises ``ValueError``, ``KeyError``."""
    value = entry[name]
    try:
        if isinstance(value, list) and min(value, default=0) >= 0:
            return array(typecode, value)
    except (TypeError, OverflowError):
        pass
    raise ValueError(f"{name} is no list of whole numbers from 0 to {2**31 - 1 if typecode == 'i' else 2**64 - 1}")


def _count(entry: dict[str, Any], name: str) -> int:
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is no whole number of 0 or more")
    if value > _MOST_TOKENS:
        raise ValueError(f"{name} is {value}: at most {_MOST_TOKENS} tokens are replayed")
    return value


def _seconds(entry: dict[str, Any], name: str) -> float:
    """A time in milliseconds, as seconds. Raises ``ValueError``, ``KeyError``."""
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is no number of milliseconds")
    return value / 1000


def _is_text(entry: dict[str, Any]) -> bool:
    if "text" in entry:
        return isinstance(entry["text"], str)
    return isinstance(entry["messages"], list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in entry["messages"]
    )


def _spread(turns: list[Turn]) -> list[Turn]:
    """Arrivals that share a tick of the trace's clock, spread evenly until its next tick."""
    ticks = [list(group) for _, group in groupby(turns, key=lambda turn: turn.at_s)]
    ends = [tick[0].at_s for tick in ticks[1:]] + [ticks[-1][0].at_s + _LAST_GAP_S]
    return [
        _moved(turn, turn.at_s + (end - turn.at_s) * index / len(tick))
        for tick, end in zip(ticks, ends, strict=True)
        for index, turn in enumerate(tick)
    ]


def _moved(turn: Turn, at_s: float) -> Turn:
    return Turn(
        at_s=at_s,
        session=turn.session,
        num_tokens=turn.num_tokens,
        num_output_tokens=turn.num_output_tokens,
        hash_ids=turn.hash_ids,
    )


def _name(turn: Turn, scheme: HashScheme) -> Job:
    num_prompt_blocks = turn.num_tokens // scheme.block_size
    if turn.token_ids is None:
        per_id = MOONCAKE_BLOCK_SIZE // scheme.block_size
        firsts = np.array(turn.hash_ids, dtype=np.uint64) * np.uint64(per_id)
        parts = np.arange(1, per_id + 1, dtype=np.uint64)  # from 1 on: key 0 is the root's
        hashes = _names((firsts[:, None] + parts).reshape(-1)[:num_prompt_blocks])
    else:
        answer = turn.output_token_ids
        hashes = scheme.block_hashes(turn.token_ids + answer if answer else turn.token_ids)
    keys = pack_keys(hashes)
    return Job(turn=turn, keys=keys[:num_prompt_blocks], all_hashes=hashes, all_keys=keys)


def _names(numbers: npt.NDArray[np.uint64]) -> list[BlockHash]:
    """A name for each number, all different and as evenly spread as hashes are: the index counts on that.

    The mixing is that of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), which is one to one and keeps 0 for 0 alone.
    """
    mixed = numbers.copy()
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    packed = mixed.astype(">u8").tobytes()
    return [packed[start : start + _NAME_BYTES] for start in range(0, len(packed), _NAME_BYTES)]
