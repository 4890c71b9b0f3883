"""What this router's requests hit most, kept in Redis for replicas that start: see ``cache.hot``.

Each boot of a router writes a key of its own, so several never undo one another's work; readers add them up. These are
prompts in clear: ``--no-hot`` keeps them out of Redis, ``--hot-max-age`` ends what nobody has hit for so long, and
requests with a ``cache_salt`` are left out unless ``--hot-salted`` lets them in.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import Callable
from typing import Any

import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError
from warmfront_pb.v1 import common_pb2

from cache.adapter import Adapter
from cache.hot import MAX_PREFIXES, MAX_TOKENS, HotPrefix, HotTable, by_value, encode_hot
from cache.prefix_index import PrefixIndex
from common.redis_keys import FleetKeys, is_wrong_type, remove_wrong_types
from router.config import RouterConfig
from router.lora import adapter_of
from router.metrics import RouterMetrics
from router.request import Work

log = logging.getLogger(__name__)

_HEARTBEATS_PER_WRITE = 5


class HotPrefixes:
    """Owns the table: ``served`` fills it, ``run`` writes it, ``follow`` compares new replicas with it."""

    def __init__(
        self, client: redis_asyncio.Redis, keys: FleetKeys, config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self.table = HotTable()
        self._client = client
        self._keys = keys
        self._config = config
        self._metrics = metrics
        # A boot of its own: after a restart the table is empty, and what was written before it still counts.
        self._name = f"{config.router_id}.{secrets.token_hex(3)}"
        self._has_written = False
        self._is_stopped = False
        self._warming: dict[str, str] = {}  # replica -> the generation that was seen to be WARMING

    def served(self, work: Work, keys: array[int], block_size: int, num_cached: int | None) -> None:
        """A request has ended, and its replica says how many tokens of the prompt it did not compute."""
        call = work.call
        if not num_cached or not self._config.hot or (call.cache_salt and not self._config.hot_salted):
            return
        adapter = adapter_of(call)
        lora = "" if adapter is None else str(adapter)
        self.table.credit(
            keys, work.token_ids, num_cached, block_size, time.monotonic(), lora=lora, cache_salt=call.cache_salt
        )

    def follow(self, lease: common_pb2.ReplicaLease, index: PrefixIndex) -> None:
        """A lease was read. Once a replica that was WARMING is READY and its events are here, count what it holds."""
        if lease.state == common_pb2.WARMING:
            self._warming[lease.replica] = lease.generation
        elif self._warming.get(lease.replica) not in (None, lease.generation) or lease.state != common_pb2.READY:
            self._warming.pop(lease.replica, None)
        elif lease.replica in self._warming and index.last_seq(lease.replica) >= lease.cache.last_seq:
            del self._warming[lease.replica]
            wanted, held = (count * lease.contract.block_size for count in self._saved(lease, index))
            self._metrics.prewarm_tokens.inc(held)
            self._metrics.prewarm_missed.inc(wanted - held)
            log.info("replica is warm replica=%s held_share=%.3f", lease.replica, held / wanted if wanted else 1.0)

    def stop(self) -> None:
        """Let ``run`` end, should it survive its cancellation."""
        self._is_stopped = True

    async def run(self, tokenizer: Callable[[], str]) -> None:
        """Write the table every few heartbeats until stopped. While Redis is away nothing is lost but time."""
        while self._config.hot and not self._is_stopped:
            await asyncio.sleep(_HEARTBEATS_PER_WRITE * self._config.heartbeat_s)
            try:
                await self._write(tokenizer())
            except (RedisError, OSError) as error:
                log.debug("hot prefixes are not written error=%r", str(error))
                if is_wrong_type(error):
                    for key in await remove_wrong_types(self._client, {self._keys.hot: "zset"}):
                        log.error("redis held another type under key=%s: removed", key)

    async def _write(self, tokenizer: str) -> None:
        # What was hit in the first half of its time is written, and its key, should this be the last write, lives for
        # the other half.
        max_age_s = self._config.hot_max_age_s / 2
        prefixes = self.table.prefixes(time.monotonic(), max_age_s)
        if not tokenizer or not (prefixes or self._has_written):
            return
        max_age_ms = round(max_age_s * 1000)
        (seconds, microseconds), num_routers = await self._time_and_routers()
        now_ms = seconds * 1000 + microseconds // 1000
        data = await asyncio.to_thread(_encoded, prefixes, MAX_TOKENS // max(1, num_routers), now_ms, tokenizer)
        pipe = self._client.pipeline(transaction=True)
        pipe.set(self._keys.hot_of(self._name), data, px=max_age_ms)
        pipe.zadd(self._keys.hot, {self._name: now_ms})
        pipe.zremrangebyscore(self._keys.hot, "-inf", now_ms - max_age_ms)
        pipe.pexpire(self._keys.hot, max_age_ms)
        await pipe.execute()
        self._has_written = True

    async def _time_and_routers(self) -> tuple[tuple[int, int], int]:
        pipe: Any = self._client.pipeline(transaction=False)
        pipe.time()
        pipe.zcard(self._keys.hot)
        now, count = await pipe.execute()
        return now, count

    def _saved(self, lease: common_pb2.ReplicaLease, index: PrefixIndex) -> tuple[float, float]:
        """Blocks that the hits of all hot prefixes save which concern this replica, and how many of them it holds."""
        wanted = held = 0.0
        loaded = {str(Adapter(one.name, one.version)) for one in lease.loras}
        for keys, hits, lora in self.table.chains(time.monotonic()):
            if lora and lora not in loaded:
                continue
            depths = index.match(keys).get(lease.replica)
            wanted += hits * len(keys)
            held += hits * depths.total if depths is not None else 0
        return wanted, held


def _encoded(prefixes: list[HotPrefix], max_tokens: int, now_ms: int, tokenizer: str) -> bytes:
    return encode_hot(by_value(prefixes, max_tokens, MAX_PREFIXES), now_ms, tokenizer)
