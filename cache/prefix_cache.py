"""The prefix cache of one worker: which KV blocks exist, who uses them, and which prefix each of them holds.

It decides and remembers; the KV itself lies elsewhere, under the same block ids. The rules are those of vLLM V1:

- The pool is allocated once. Block 0 is a scratch block and never handed out.
- A request's table of blocks only ever grows. A full block whose KV is computed carries its hash and can be found; it
  stays findable after the request has gone, until its block is needed for something else (lazy eviction, at pop).
- Freed blocks queue for reuse. Blocks without a hash cache nothing and go to the front; hashed ones go to the tail,
  the end of the chain first. So a block always goes before the one it follows.
- A hit is whole blocks and never the whole prompt: the last token must be computed to have its logits.
- When blocks are short nothing changes at all.
- With a host tier (``cache.host_tier``) what the device evicts goes there instead of being lost, and a prompt that goes
  on there gets it back: by copies (``take_copies``), which whoever computes does first, in order.

Time is an argument (``now``, seconds on any one monotonic clock). Nothing here is thread-safe: one thread owns it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from cache.block_hash import ROOT_KEY, BlockChain, BlockHash, HashScheme, TokenIds, num_token_ids
from cache.block_pool import BlockIds, BlockPool
from cache.contents import Contents
from cache.device_tier import DeviceTier
from cache.events import (
    Cleared,
    Event,
    EventBatch,
    RemovalReason,
    Removed,
    Snapshot,
    Stored,
    Tier,
    chain_runs,
    stored_runs,
)
from cache.eviction import EvictionOrder, EvictionPolicy
from cache.history import Eviction, EvictionHistory
from cache.host_tier import HostTier, Keys, stretches
from cache.retention import MAX_BREAKPOINTS, Retention, RetentionBudget
from cache.stats import CacheStats
from cache.token_reuse import BlockFronts

RequestId: TypeAlias = Hashable
_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)
_Leaving: TypeAlias = tuple[BlockIds, list[BlockHash], float]  # blocks, their hashes, since when nobody used them


class BlockCopies(NamedTuple):
    """Copy the KV of the first ``num_tokens`` slots of each of ``sources`` to the same slots of its target.

    Each side is numbered within its tier. A block of the host tier may be a target twice: the later one stays.
    """

    sources: list[int]
    targets: list[int]
    num_tokens: int
    source_tier: Tier = Tier.DEVICE
    target_tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request got.

    ``num_cached_tokens`` need no computing, ``num_host_tokens`` of them come back from the host tier. ``block_ids`` is
    the request's live table, typecode "i", which numpy reads where it lies: ``append`` makes it longer, so keep no view
    of it, and nothing ever changes an entry. What is to be copied for it is in ``PrefixCache.take_copies``.
    """

    num_cached_tokens: int
    block_ids: array[int]
    num_host_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt finds what it finds.

    ``hit``: all it can; ``below_block``: it has no full block before its last token; ``evicted``: the next block
    stood here, ``eviction`` says what became of it; ``never_seen``: it did not, as far as is remembered.
    """

    reason: Literal["hit", "below_block", "evicted", "never_seen"]
    num_matched_tokens: int
    num_pending_tokens: int
    eviction: Eviction | None = None


@dataclass(slots=True)
class _Running:
    chain: BlockChain
    block_ids: array[int]
    num_committed: int
    """Leading blocks that can be found."""
    num_prompt_blocks: int
    num_computed: int
    retention: Sequence[Retention]
    tenant: str
    collided: bool = False


class PrefixCache:
    """See the module. ``num_blocks`` counts block 0, so ``num_blocks - 1`` can be used.

    With ``enabled=False`` it allocates and frees, looks nothing up, keeps nothing and reports nothing.
    ``policy``: ``lru``, or ``slru``, which keeps blocks that were hit apart from a flood of one-shot prompts.
    ``token_reuse_min``: the least number of tokens worth a copy out of a block of another prefix; None is off.
    ``retention``: how many blocks requests may ask to keep; half of the pool and a quarter per tenant by default.
    ``num_host_blocks``: blocks of the host tier, all of which can be used; 0 is none.
    """

    def __init__(
        self,
        num_blocks: int,
        scheme: HashScheme,
        enabled: bool = True,
        *,
        replica: str = "",
        generation: str = "",
        policy: EvictionPolicy = "slru",
        token_reuse_min: int | None = None,
        retention: RetentionBudget | None = None,
        history_size: int = 65_536,
        num_host_blocks: int = 0,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} blocks leave none beside block 0")
        if token_reuse_min is not None and token_reuse_min < 1:
            raise ValueError(f"token reuse from {token_reuse_min} tokens")
        if num_host_blocks < 0:
            raise ValueError(f"{num_host_blocks} blocks in the host tier")
        self.num_blocks = num_blocks
        self.scheme = scheme
        self.enabled = enabled
        self.replica = replica
        self.generation = generation
        self.policy = policy
        self.token_reuse_min = token_reuse_min if enabled else None
        self.stats = CacheStats()
        self._pool = BlockPool(num_blocks)
        self._now = float("-inf")
        self._device = DeviceTier(num_blocks)
        retention = retention or RetentionBudget(num_blocks // 2, num_blocks // 4)
        self._order = EvictionOrder(self._pool, self._device, policy, retention)
        self._contents = Contents() if scheme.verifies_tokens else None
        self._fronts = BlockFronts(self.token_reuse_min) if self.token_reuse_min is not None else None
        self._history = EvictionHistory(history_size)
        self._host = HostTier(num_host_blocks) if num_host_blocks and enabled else None
        self._copies: list[BlockCopies] = []
        self._running: dict[RequestId, _Running] = {}
        self._computing: dict[RequestId, _Running] = {}
        self._preempted: dict[RequestId, None] = {}
        self._events: list[Event] = []
        self._first_seq = 1

    # Looking

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request uses, cached ones included: what can be allocated."""
        return self._pool.num_idle

    @property
    def num_used_blocks(self) -> int:
        """Blocks that running requests use."""
        return self.num_blocks - 1 - self._pool.num_idle

    @property
    def num_cached_blocks(self) -> int:
        """Different block hashes on the device: what the router's index holds of this replica there."""
        return len(self._device)

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier."""
        return self._host.num_blocks if self._host is not None else 0

    @property
    def num_host_cached_blocks(self) -> int:
        """Different block hashes in the host tier, those that stand on the device too included."""
        return len(self._host) if self._host is not None else 0

    @property
    def num_retained_blocks(self) -> int:
        """Of the cached ones, those that requests asked to keep and whose time is not over."""
        return self._order.num_retained

    @property
    def last_seq(self) -> int:
        """The number of the last event made, taken or not; 0 before the first."""
        return self._first_seq + len(self._events) - 1

    def num_tokens(self, request_id: RequestId) -> int:
        """Tokens of a running request, prompt and output."""
        return len(self._running[request_id].chain)

    def match(self, chain: BlockChain) -> int:
        """Tokens of ``chain`` that would be hits now: whole blocks, less than all. Changes nothing."""
        return self._num_hit_blocks(chain) * self.scheme.block_size

    def pending(self, chain: BlockChain) -> int:
        """Tokens (whole blocks) after the match that running requests are computing right now.

        A scheduler may hold ``chain`` back until they are committed instead of computing them a second time.
        """
        return (self._num_coming_blocks(chain) - self._num_hit_blocks(chain)) * self.scheme.block_size

    def explain(self, chain: BlockChain) -> Explanation:
        """Why ``chain`` matches no more than it does. Changes nothing; about 20 us when blocks are missing."""
        size = self.scheme.block_size
        num_hit, limit = self._num_hit_blocks(chain), _max_hit_blocks(chain)
        pending = (self._num_coming_blocks(chain) - num_hit) * size
        if not limit:
            return Explanation("below_block", 0, 0)
        if num_hit == limit:
            return Explanation("hit", num_hit * size, pending)
        eviction = self._history.find(chain.keys[num_hit])
        return Explanation("never_seen" if eviction is None else "evicted", num_hit * size, pending, eviction)

    def eviction_of(self, key: int) -> Eviction | None:
        """The latest eviction of the block with this index key, as far as is remembered. About 20 us."""
        return self._history.find(key)

    def lru_age_s(self, now: float) -> float:
        """For how long the block that would be lost next has been idle; 0 while there are empty blocks.

        With a host tier that is one of its blocks: what leaves the device is not lost.
        """
        if self._host is not None:
            since_s = self._host.next_lost_idle_since_s()
            return 0.0 if since_s is None else max(0.0, now - since_s)
        following = self._pool.peek()
        if following is None or not self._device.holds_hash[following[0]]:
            return 0.0
        return max(0.0, now - following[1])

    # Changing

    def admit(
        self,
        request_id: RequestId,
        chain: BlockChain,
        now: float = 0.0,
        *,
        synthetic: bool = False,
        reuse: bool = True,
        retention: Sequence[Retention] = (),
        tenant: str = "",
    ) -> Admission | None:
        """Take the cached front of ``chain`` and allocate blocks for the rest of it; None (no change) when short.

        The table covers all of ``len(chain)`` tokens. Nothing new is visible to others before ``commit``. The chain
        belongs to the cache from here on: ``append`` extends it. ``synthetic`` traffic is counted apart. Without
        ``reuse`` the whole prompt is computed, for whoever wants more of it than its KV (logprobs of its tokens).
        ``retention``: up to 4 fronts of the prompt to be kept for a while, on the account of ``tenant``; what the
        budget has no room for is silently not kept.
        Raises ``ValueError`` for an empty chain, one of another scheme, more than 4 fronts, or an id that is running.
        """
        self._check_admissible(request_id, chain, retention)
        size = self.scheme.block_size
        num_hit = self._num_hit_blocks(chain) if reuse else 0
        num_on_device = num_hit if self._host is None else self._num_on_device(chain, num_hit)
        hits = self._device.blocks_of(chain.hashes[:num_on_device])
        num_new = -(-len(chain) // size) - num_on_device
        num_left = self._pool.num_idle - int(np.count_nonzero(self._pool.references[hits] == 0)) - num_new
        if num_left < 0:
            return None
        self._pass_time(now)
        source, num_copied = self._front_to_copy(chain, num_hit, num_left) if reuse else (0, 0)
        num_from_host = (num_hit - num_on_device) * size
        is_first = self._count(request_id, chain, num_hit * size + num_copied, num_copied, num_from_host, synthetic)
        if is_first and reuse and num_hit < _max_hit_blocks(chain):
            self._count_miss(chain, num_hit)

        self._pool.use(hits)
        self._order.hit(hits)
        table = array("i", hits.astype(np.int32).tobytes())
        returning = chain.hashes[num_on_device:num_hit]
        in_host = self._host.use(returning) if self._host is not None and returning else _NO_BLOCKS
        if num_copied:
            kept = np.array([source], dtype=np.int32)
            self._pool.use(kept)
            table.extend(self._take(num_new, request_id))
            self._order.queue(self._pool.drop(kept), self._now)
            self._copies.append(BlockCopies([source], [table[num_hit]], num_copied))
        else:
            table.extend(self._take(num_new, request_id))
        num_cached = num_hit * size + num_copied
        running = _Running(chain, table, num_hit, len(chain.hashes), num_cached, tuple(retention), tenant)
        if self._host is not None and returning:
            self._copies.append(
                BlockCopies(in_host.tolist(), table[num_on_device:num_hit].tolist(), size, Tier.HOST, Tier.DEVICE)
            )
            self._host.put_back(in_host, self._now)
            self._publish(running, num_on_device, num_hit)
            self._order.hit(table[num_on_device:num_hit])
        self._order.touch(chain.hashes[:num_hit], self._now)
        self._order.retain(chain.hashes, range(num_hit), retention, tenant, size, self._now)

        self._running[request_id] = running
        if self.enabled and num_hit < running.num_prompt_blocks:
            self._computing[request_id] = running
        return Admission(num_cached, table, num_from_host)

    def append(self, request_id: RequestId, token_ids: TokenIds, now: float = 0.0) -> bool:
        """Extend the request's chain by output tokens, with new blocks as they begin; False (no change) when short."""
        running = self._running[request_id]
        num_tokens = len(running.chain) + num_token_ids(token_ids)
        num_new = -(-num_tokens // self.scheme.block_size) - len(running.block_ids)
        if num_new > self._pool.num_idle:
            return False
        running.chain.extend(token_ids)
        if num_new > 0:
            self._pass_time(now)
            running.block_ids.extend(self._take(num_new, request_id))
        return True

    def renew(self, chain: BlockChain, now: float = 0.0) -> None:
        """Queue the cached front of ``chain`` as if it had just been used.

        For the request at the head of a waiting queue: what it is about to hit should not be evicted for others.
        """
        num_hit = self._num_hit_blocks(chain)
        num_on_device = num_hit if self._host is None else self._num_on_device(chain, num_hit)
        hits = self._device.blocks_of(chain.hashes[:num_on_device])
        self._pass_time(now)
        if self._host is not None:
            self._host.renew(chain.hashes[num_on_device:num_hit], self._now)
        self._order.requeue(hits[self._pool.references[hits] == 0][::-1], self._now)

    def commit(self, request_id: RequestId, num_computed: int) -> None:
        """The KV of the request's first ``num_computed`` tokens is in place: its full blocks become visible.

        Call it when whoever admits a request afterwards will read after that KV is written. A smaller number than
        before changes nothing. Raises ``ValueError`` for more tokens than the request has.
        """
        running = self._running[request_id]
        if num_computed > len(running.chain):
            raise ValueError(f"{num_computed} tokens computed of {len(running.chain)} in request {request_id!r}")
        running.num_computed = max(running.num_computed, num_computed)
        start, end = running.num_committed, num_computed // self.scheme.block_size
        if not self.enabled or end <= start or running.collided:
            return
        if self._contents is not None:
            wanted, end = end, self._contents.claim(running.chain, start, end)
            running.collided = end < wanted  # its caching ends there
            self.stats.num_collisions += running.collided
        self._publish(running, start, end)
        if self._host is not None:
            self._host.double(running.chain.hashes[start:end], self._now)
        running.num_committed = end
        if end >= running.num_prompt_blocks or running.collided:
            self._computing.pop(request_id, None)
        if running.retention and start < running.num_prompt_blocks:
            # The whole front again, so that no block is wanted for longer than the one it follows.
            front = range(min(end, running.num_prompt_blocks))
            size = self.scheme.block_size
            self._order.retain(running.chain.hashes, front, running.retention, running.tenant, size, self._now)

    def free(self, request_id: RequestId, now: float = 0.0, recompute: bool = False) -> None:
        """The request ends; its committed blocks stay findable until they are needed.

        ``recompute`` says it was preempted and will be admitted again under the same id: what it then finds or
        computes again is counted as recomputed, not as query and hit. Freeing a preempted request forgets it.
        Raises ``KeyError`` for an id that is neither running nor preempted.
        """
        running = self._running.pop(request_id, None)
        if running is None:
            del self._preempted[request_id]
            return
        self._computing.pop(request_id, None)
        if recompute:
            self._preempted[request_id] = None
        self._pass_time(now)
        idle = self._pool.drop(np.frombuffer(running.block_ids, dtype=np.int32)[::-1])
        is_kept = self._device.holds_hash[idle]
        if self._fronts is not None and not recompute and not running.collided:
            depth = running.num_committed
            if self._fronts.add_partial(running.chain, depth, running.num_computed, running.block_ids):
                is_kept |= idle == running.block_ids[depth]
        if is_kept.all():
            self._order.queue(idle, self._now)
        else:
            self._pool.queue_front(idle[~is_kept], self._now)
            self._order.queue(idle[is_kept], self._now)

    def reset(self) -> bool:
        """Forget every cached block; False (no change) while a request is running."""
        if self._running:
            return False
        if not self.enabled:
            return True
        self._device.clear()
        if self._contents is not None:
            self._contents.clear()
        if self._fronts is not None:
            self._fronts.clear()
        self._order.clear()
        if self._host is not None:
            self._host.clear()
        self._copies.clear()
        self._events.append(Cleared())
        return True

    def take_copies(self) -> list[BlockCopies]:
        """What is to be copied since the last call: one after the other, before any KV is written.

        Blocks change hands while requests are admitted, so a later copy may write what an earlier one reads.
        """
        copies, self._copies = self._copies, []
        return copies

    # Reporting

    def take_events(self) -> EventBatch | None:
        """The events since the last call, None when there are none."""
        if not self._events:
            return None
        batch = EventBatch(self.replica, self.generation, self._first_seq, tuple(self._events))
        self._first_seq += len(self._events)
        self._events.clear()
        return batch

    def snapshot(self) -> Snapshot:
        """All findable blocks as runs in chain order, at ``last_seq``. Sorts them: about a microsecond per block.

        Those on the device come first: what stands in the host tier follows a block of either.
        """
        runs = chain_runs(*self._device.contents())
        if self._host is not None:
            runs += chain_runs(*self._host.contents(), tier=Tier.HOST)
        return Snapshot(self.replica, self.generation, self.last_seq, tuple(runs))

    def free_queue(self) -> list[int]:
        """The blocks that can be allocated, next to be taken first. Linear."""
        return self._pool.in_order()

    def host_block_hashes(self) -> dict[int, BlockHash]:
        """Block of the host tier to hash. Linear."""
        return self._host.cached_block_hashes() if self._host is not None else {}

    def host_queue(self) -> list[int]:
        """The blocks of the host tier, next to be taken first. Linear."""
        return self._host.order() if self._host is not None else []

    def cached_block_hashes(self) -> dict[int, BlockHash]:
        """Block id to hash, for every block of the device that carries one. Linear."""
        return self._device.cached_block_hashes()

    def check_invariants(self) -> None:
        """Raises ``AssertionError`` when anything here contradicts anything else. Linear; for tests."""
        self._pool.check_invariants()
        counted = np.zeros(self.num_blocks, dtype=np.int32)
        for running in self._running.values():
            assert len(set(running.block_ids)) == len(running.block_ids)
            assert len(running.block_ids) == -(-len(running.chain) // self.scheme.block_size)
            counted[running.block_ids] += 1
        assert (counted == self._pool.references).all()
        resident = self._device.check_invariants()
        if self._contents is not None:
            assert self._contents.names() == self._device.names() | set(self.host_block_hashes().values())
        if self._host is not None:
            self._host.check_invariants(self._device.names(), resident)
        if self._fronts is not None:
            self._fronts.check_invariants(self._device.holds_hash)
        self._order.check_invariants()
        assert self._computing.keys() <= self._running.keys()

    # Inside: looking

    def _num_hit_blocks(self, chain: BlockChain) -> int:
        """Leading blocks that can be found, in any tier."""
        if not self.enabled:
            return 0
        limit = _max_hit_blocks(chain)
        if self._contents is not None:
            return self._contents.num_same(chain, limit)
        low = _front_end(self._device, chain.hashes, 0, limit)
        return low if self._host is None else _front_end(self._host, chain.hashes, low, limit)

    def _num_on_device(self, chain: BlockChain, limit: int) -> int:
        """Of its first ``limit`` blocks, the leading ones on the device."""
        return _front_end(self._device, chain.hashes, 0, limit)

    def _num_coming_blocks(self, chain: BlockChain) -> int:
        """Leading blocks that can be found or are being computed."""
        limit = _max_hit_blocks(chain)
        best = self._num_hit_blocks(chain)
        hashes = chain.hashes
        for running in self._computing.values():
            others, end = running.chain.hashes, min(limit, running.num_prompt_blocks)
            # Equal hashes mean equal chains, so one comparison rules most of them out and halving finds the rest.
            if best < end and others[best] == hashes[best]:
                low, high = best + 1, end
                while low < high:
                    middle = (low + high) // 2
                    if others[middle] == hashes[middle]:
                        low = middle + 1
                    else:
                        high = middle
                best = low
        return best

    def _front_to_copy(self, chain: BlockChain, num_hit: int, num_left: int) -> tuple[int, int]:
        """The block whose leading tokens go on where the hits end, and how many are worth a copy (0: none)."""
        best = self._fronts.longest(chain, num_hit) if self._fronts is not None else None
        if best is None:
            return 0, 0
        source, num_common, is_worth_a_copy = best
        has_room = num_left > 0 or self._pool.references[source] > 0
        if is_worth_a_copy and has_room:
            return source, num_common
        self.stats.num_lost_tokens += num_common
        return 0, 0

    def _check_admissible(self, request_id: RequestId, chain: BlockChain, retention: Sequence[Retention]) -> None:
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is running already")
        if not len(chain):
            raise ValueError(f"request {request_id!r} has no tokens")
        if chain.scheme is not self.scheme and chain.scheme.fingerprint() != self.scheme.fingerprint():
            raise ValueError(f"request {request_id!r} is hashed by {chain.scheme}, this cache by {self.scheme}")
        if len(retention) > MAX_BREAKPOINTS:
            raise ValueError(f"{len(retention)} retention marks, at most {MAX_BREAKPOINTS}")

    # Inside: changing

    def _pass_time(self, now: float) -> None:
        self._now = max(self._now, now)
        self._order.pass_time(self._now)

    def _take(self, count: int, culprit: RequestId) -> list[int]:
        """The next ``count`` idle blocks; what they cached is evicted, to the host tier where there is one."""
        taken: list[int] = []
        leaving: list[_Leaving] = []
        for blocks, idle_since_s in self._pool.take(count):
            if self._fronts is not None:
                self._fronts.discard(blocks)
            gone, names = self._device.take_out(blocks)
            self._order.forget(blocks, names)
            if names:
                leaving.append((gone, names, idle_since_s))
            taken += blocks.tolist()
        if not leaving:
            return taken
        lost, demoted = array("Q"), array("Q")
        if self._host is not None:
            leaving, demoted = self._demote(self._host, leaving, culprit)
        for gone, names, idle_since_s in leaving:
            lost += self._lose(names, self._device.keys[gone], idle_since_s, culprit)
        if lost:
            self._events.append(Removed(lost, RemovalReason.EVICTED))
        if demoted:
            self._events.append(Removed(demoted, RemovalReason.DEMOTED))
        return taken

    def _demote(self, host: HostTier, leaving: list[_Leaving], culprit: RequestId) -> tuple[list[_Leaving], array[int]]:
        """What leaves the device goes to the host tier: the first of it that find no place there; the others' keys."""
        gone = np.concatenate([blocks for blocks, _, _ in leaving])
        names = [name for _, some, _ in leaving for name in some]
        idle_since_s = np.repeat([since_s for *_, since_s in leaving], [len(some) for _, some, _ in leaving])
        keys, parent_keys = self._device.keys[gone], self._device.parent_keys_of(gone)
        demotion = host.take_in(names, keys, parent_keys, idle_since_s)
        num_refused = demotion.num_refused
        refused = set(names[:num_refused])
        for out in demotion.lost:
            self._events.append(Removed(array("Q", out.keys.tobytes()), RemovalReason.EVICTED, Tier.HOST))
            is_lost = [name not in self._device and name not in refused for name in out.names]
            lost = [name for name, last in zip(out.names, is_lost, strict=True) if last]
            self._lose(lost, out.keys[is_lost], out.idle_since_s, culprit)
        fresh = demotion.positions
        if fresh.size:
            size = self.scheme.block_size
            sources, targets = gone[fresh].tolist(), demotion.targets.tolist()
            self._copies.append(BlockCopies(sources, targets, size, Tier.DEVICE, Tier.HOST))
            # They go from the ends of chains on: backwards, each follows the one before it.
            self._events += stored_runs(keys[fresh[::-1]], parent_keys[fresh[::-1]], Tier.HOST)
        self.stats.num_demoted_blocks += len(names) - num_refused
        left = stretches(idle_since_s[:num_refused])
        homeless = [(gone[start:end], names[start:end], since_s) for start, end, since_s in left]
        return homeless, array("Q", keys[num_refused:].tobytes())

    def _lose(self, names: list[BlockHash], keys: Keys, idle_since_s: float, culprit: RequestId) -> array[int]:
        """These hashes stand in no tier any more; returns their keys."""
        if self._contents is not None:
            self._contents.forget(names)
        idle_s = max(0.0, self._now - idle_since_s)
        self._history.add(keys, self._now, idle_s, RemovalReason.EVICTED, culprit)
        self.stats.num_evicted_blocks += keys.size
        self.stats.evicted_idle_s += keys.size * idle_s
        return array("Q", keys.tobytes())

    def _publish(self, running: _Running, start: int, end: int) -> None:
        """Blocks ``start`` to ``end`` of a table can be found from here on."""
        if start == end:
            return
        chain, blocks = running.chain, running.block_ids[start:end]
        keys = chain.keys[start:end]
        parent = chain.keys[start - 1] if start else ROOT_KEY
        is_first = self._device.put(chain.hashes[start:end], blocks, keys, parent)
        if self._fronts is not None:
            for depth in itertools.compress(range(start, end), is_first):
                self._fronts.add(chain, depth, running.block_ids[depth])
        if all(is_first):
            self._events.append(Stored(parent, keys))
        else:
            parents = np.array([parent, *keys[:-1]], dtype=np.uint64)
            self._events += stored_runs(np.frombuffer(keys, dtype=np.uint64)[is_first], parents[is_first])

    def _count(
        self,
        request_id: RequestId,
        chain: BlockChain,
        num_cached: int,
        num_copied: int,
        num_from_host: int,
        synthetic: bool,
    ) -> bool:
        """Whether this is a first admission of a user's request, the only kind that asks and hits."""
        stats = self.stats
        num_tokens = len(chain)
        if request_id in self._preempted:
            del self._preempted[request_id]
            stats.num_recomputed_tokens += num_tokens - num_cached
            return False
        if synthetic:
            return False
        if self.enabled:
            stats.num_requests += 1
            stats.num_query_tokens += num_tokens
            stats.num_hit_tokens += num_cached
            stats.num_copied_tokens += num_copied
            stats.num_host_hit_tokens += num_from_host
        return self.enabled

    def _count_miss(self, chain: BlockChain, num_hit: int) -> None:
        self.stats.num_misses += 1
        self.stats.num_misses_at_root += not num_hit
        self.stats.num_misses_of_evicted += self._history.find(chain.keys[num_hit]) is not None


def _max_hit_blocks(chain: BlockChain) -> int:
    return max(0, len(chain) - 1) // chain.scheme.block_size


def _front_end(known: Container[BlockHash], hashes: Sequence[BlockHash], start: int, end: int) -> int:
    """Where the front of ``hashes`` that is known ends, which is not before ``start``.

    No block is cached without the one before it, so halving finds it.
    """
    while start < end:
        middle = (start + end) // 2
        if hashes[middle] in known:
            start = middle + 1
        else:
            end = middle
    return start
