"""Pre-warm: compute the fleet's hottest prefixes before the first user request. See ``cache.hot``.

Nothing here can keep a worker from serving: whatever fails or takes too long ends it, and the worker is READY. The
same steps serve ``warmfront prewarm``, which computes on another worker, over the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from redis.exceptions import RedisError
from warmfront_pb.v1 import common_pb2

from cache.adapter import Adapter
from cache.hot import HotDecodeError, HotPrefix, HotSet, Ranked, by_value, decode_hot, merged, saved_tokens
from common.redis_client import connect_redis
from common.redis_keys import FleetKeys
from worker.adapters import Adapters, UnknownAdapterError
from worker.batch import SamplingParams
from worker.engine import Engine
from worker.intake import unpacked
from worker.request import Ending, Piece, Request

logger = logging.getLogger(__name__)

POOL_SHARE = 0.9  # of the blocks: the rest is for the first requests
PRESSED_WAIT_S = 5.0  # of prefill waiting on each ready replica: then help is needed more than warmth
IN_FLIGHT = 2  # synthetic requests at once, so that the engine always has the next one
PRIORITY = 1 << 20  # after everyone else's
_MAX_AGE_S = 24 * 3600.0  # a router's key expires before
_LOOK_PERIOD_S = 0.5
_REDIS_TIMEOUT_S = 5.0
_T = TypeVar("_T")


class Source(Protocol):
    """Where hot prefixes come from."""

    async def read(self, tokenizer: str) -> list[HotPrefix]:
        """Those made of this tokenizer's ids."""
        ...

    async def pressure(self) -> str:
        """Why the fleet cannot wait; empty when it can."""
        ...

    async def close(self) -> None:
        """It is not needed any more."""
        ...


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a pre-warm has come. ``ended`` says why it ended: target, all, or what kept it from more."""

    num_prefixes: int = 0  # that fit
    num_done: int = 0
    num_tokens: int = 0  # prompt tokens in place
    saved: float = 0.0  # what they save, in tokens times hits
    wanted: float = 0.0  # what all hot prefixes would save
    ended: str = ""

    @property
    def share(self) -> float:
        """Of what all hot prefixes would save."""
        return self.saved / self.wanted if self.wanted else 1.0


Compute = Callable[[HotPrefix], Awaitable[bool]]
"""Computes a prefix; false when that did not work and others still may."""


async def fill(plan: Sequence[Ranked], compute: Compute, target: float, progress: Progress) -> None:
    """Compute a plan in its order, a few at once, until ``target`` of ``progress.wanted`` is in place.

    Raises what ``compute`` raises. Cancelled, it leaves ``progress`` as far as it came.
    """
    todo = iter(plan)

    async def work() -> None:
        for one in todo:
            if progress.share >= target:
                progress.ended = "target"
                return
            if not await compute(one.prefix):
                continue
            progress.num_done += 1
            progress.num_tokens += one.num_new_tokens
            progress.saved += one.saved_tokens

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(work())
    except ExceptionGroup as group_of_errors:
        raise group_of_errors.exceptions[0] from None
    progress.ended = progress.ended or ("target" if progress.share >= target else "all")


async def fill_unless_pressed(
    plan: Sequence[Ranked],
    compute: Compute,
    target: float,
    progress: Progress,
    pressure: Callable[[], Awaitable[str]],
) -> None:
    """``fill``, which ends when ``pressure`` says why the fleet cannot wait. Raises what ``compute`` raises."""
    filling = asyncio.create_task(fill(plan, compute, target, progress))
    looking = asyncio.create_task(_until(pressure))
    try:
        await asyncio.wait([filling, looking], return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            progress.ended = f"pressed: {looking.result()}"
        else:
            filling.result()
    finally:
        filling.cancel()
        looking.cancel()


async def _until(pressure: Callable[[], Awaitable[str]]) -> str:
    while True:
        with contextlib.suppress(RedisError, OSError):  # what is not known is no reason to hurry
            if reason := await pressure():
                return reason
        await asyncio.sleep(_LOOK_PERIOD_S)


def make_plan(
    prefixes: Iterable[HotPrefix],
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    vocab_size: int,
    adapters: Collection[str] = (),
) -> tuple[list[Ranked], float]:
    """What this worker can compute of them, the most valuable first, and what all that concern it would save.

    Those of adapters other than ``adapters``, the identities of the loaded ones, do not: their requests do not come
    here. What holds ids beyond the vocabulary is left out. Ends are cut to this worker's whole blocks.
    """
    known = [one for one in prefixes if not one.lora or one.lora in adapters]
    usable = []
    for one in known:
        length = min(one.num_tokens, max_model_len - 1) // block_size * block_size
        if length and np.frombuffer(one.token_ids, dtype="<u4").max() < vocab_size:
            usable.append(HotPrefix(one.token_ids[: 4 * length], one.hits, one.lora, one.cache_salt))
    room = int(POOL_SHARE * num_blocks) * block_size
    return by_value(usable, room), saved_tokens(known)


class RedisSource:
    """The hot prefixes of one fleet, of ``also_fleet`` too where that is given, and the load of both."""

    def __init__(
        self,
        url: str,
        fleet: str,
        *,
        password_file: Path | None = None,
        also_fleet: str | None = None,
        own_replica: str = "",
    ) -> None:
        self._fleets: list[tuple[FleetKeys, Any]] = [  # a client each: two fleets may lie on two nodes of a cluster
            (FleetKeys(name), connect_redis(url, fleet=name, timeout_s=_REDIS_TIMEOUT_S, password_file=password_file))
            for name in dict.fromkeys((fleet, also_fleet or fleet))
        ]
        self._own_replica = own_replica
        self._has_told = False

    async def sets(self) -> tuple[list[HotSet], int]:
        """What each router has written, and the time on Redis' clock in milliseconds."""
        answers = await self._ask_each(self._sets_of)
        return [one for found, _ in answers for one in found], max(now_ms for _, now_ms in answers)

    async def _sets_of(self, keys: FleetKeys, redis: Any) -> tuple[list[HotSet], int]:
        found = []
        seconds, microseconds = await redis.time()
        for router in await redis.zrange(keys.hot, 0, -1):
            name = router.decode(errors="replace")  # others may write what is no UTF-8
            data = await redis.get(keys.hot_of(name))
            if data is None:
                continue
            try:
                found.append(decode_hot(data))
            except HotDecodeError as error:
                logger.warning("prewarm: what router=%s wrote is unreadable error=%r", name, str(error))
        return found, seconds * 1000 + microseconds // 1000

    async def read(self, tokenizer: str) -> list[HotPrefix]:
        """Those of all routers, added up. Raises ``RedisError`` and ``OSError``."""
        found, now_ms = await self.sets()
        return merged((one for one in found if one.tokenizer == tokenizer), now_ms, _MAX_AGE_S)

    async def pressure(self) -> str:
        """Why the fleet cannot wait, by the leases of its replicas. Raises ``RedisError`` and ``OSError``."""
        return pressure_of(await self.others(self._own_replica))

    async def others(self, replica: str) -> list[common_pb2.ReplicaLease]:
        """The leases of all replicas but one of the own fleet. Raises ``RedisError`` and ``OSError``."""
        own, *of_others = await self._ask_each(self._leases_of)
        return [lease for lease in own if lease.replica != replica] + [lease for one in of_others for lease in one]

    async def _leases_of(self, keys: FleetKeys, redis: Any) -> list[common_pb2.ReplicaLease]:
        leases: list[common_pb2.ReplicaLease] = []
        names = [name.decode(errors="replace") for name in await redis.zrange(keys.replicas, 0, -1)]
        values = await redis.mget(list(map(keys.replica, names))) if names else ()
        for data in values:
            with contextlib.suppress(DecodeError):
                leases += [common_pb2.ReplicaLease.FromString(data)] if data is not None else []
        return leases

    async def _ask_each(self, ask: Callable[[FleetKeys, Any], Awaitable[_T]]) -> list[_T]:
        """Each fleet's answer; one that the other fleet does not give (to our user, say) costs ours nothing."""
        answers = []
        for keys, redis in self._fleets:
            try:
                answers.append(await ask(keys, redis))
            except (RedisError, OSError) as error:
                if not answers:  # the first is the fleet itself
                    raise
                if not self._has_told:
                    logger.warning("prewarm: cannot read the other fleet error=%r", str(error))
                    self._has_told = True
        return answers

    async def close(self) -> None:
        """Close the connections."""
        for _, redis in self._fleets:
            with contextlib.suppress(RedisError, OSError):
                await redis.aclose()


def pressure_of(others: Iterable[common_pb2.ReplicaLease]) -> str:
    """Why a fleet with these other replicas cannot wait; empty when it can."""
    ready = [lease for lease in others if lease.state == common_pb2.READY]
    return overload_of(ready) if ready else "no other replica is ready"


def overload_of(leases: Iterable[common_pb2.ReplicaLease]) -> str:
    """By how much the ready ones of these replicas have too much to do; empty where they have not."""
    ready = [lease for lease in leases if lease.state == common_pb2.READY]
    speeds = [lease.load.prefill_tokens_per_s for lease in ready]
    waits_s = [lease.load.waiting_tokens / speed for lease, speed in zip(ready, speeds, strict=True) if speed]
    mean_s = sum(waits_s) / max(1, len(ready))
    return f"{mean_s:.1f} s of prefill wait on each replica" if mean_s > PRESSED_WAIT_S else ""


class Prewarm:
    """One worker's pre-warm, through its own engine. ``run`` ends by itself; ``stop`` ends it at once."""

    def __init__(
        self,
        engine: Engine,
        adapters: Adapters,
        source: Source,
        *,
        tokenizer: str,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
        target: float,
    ) -> None:
        self.progress = Progress()
        self._engine = engine
        self._adapters = adapters
        self._source = source
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._target = target
        self._in_engine: set[int] = set()

    async def run(self) -> None:
        """Until the target is reached, all that fits is done, or the fleet cannot wait. Raises nothing of its own."""
        try:
            await self._run()
        except Exception as error:
            self.progress.ended = f"failed: {type(error).__name__}: {error}"
        finally:
            self.stop()
            await self._source.close()

    def stop(self) -> None:
        """Take back what is still in the engine."""
        for number in self._in_engine:
            self._engine.cancel(number)
        self._in_engine.clear()

    async def _run(self) -> None:
        progress = self.progress
        prefixes = await self._source.read(self._tokenizer)
        plan, progress.wanted = await asyncio.to_thread(
            make_plan,
            prefixes,
            num_blocks=self._engine.snapshot().num_blocks,
            block_size=self._block_size,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            adapters={str(one.adapter) for one in self._adapters.listed},
        )
        progress.num_prefixes = len(plan)
        if not plan:
            progress.ended = "nothing is hot" if not prefixes else "no hot prefix fits"
            return
        await fill_unless_pressed(plan, self._compute, self._target, progress, self._source.pressure)

    async def _compute(self, prefix: HotPrefix) -> bool:
        ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

        def sink(item: Piece | Ending) -> None:
            if isinstance(item, Ending) and not ended.done():
                ended.set_result(item)

        try:
            adapter = self._adapters.find(*Adapter.parse(prefix.lora)) if prefix.lora else None
        except UnknownAdapterError:  # it has been unloaded meanwhile
            return False
        number = self._engine.submit(_request(prefix, adapter), sink)
        self._in_engine.add(number)
        ending = await ended
        self._in_engine.discard(number)
        if ending.failure is not None:
            logger.warning("prewarm: a prefix of %d tokens failed: %s", prefix.num_tokens, ending.failure.value)
        return ending.failure is None


def _request(prefix: HotPrefix, adapter: Adapter | None) -> Request:
    return Request(
        id="prewarm",
        token_ids=unpacked(prefix.token_ids),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=1,
        ignore_eos=True,
        adapter=adapter,
        cache_salt=prefix.cache_salt or None,
        priority=PRIORITY,
        synthetic=True,
    )
