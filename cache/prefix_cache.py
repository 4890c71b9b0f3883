"""The prefix cache of one worker: which KV blocks exist, who uses them, and which prefix each of them holds.

It decides and remembers; the KV itself lies elsewhere, under the same block ids. The rules are those of vLLM V1:

- The pool is allocated once. Block 0 is a scratch block and never handed out.
- A request's table of blocks only ever grows. A full block whose KV is computed carries its hash and can be found; it
  stays findable after the request has gone, until its block is needed for something else (lazy eviction, at pop).
- Freed blocks queue for reuse. Blocks without a hash cache nothing and go to the front; hashed ones go to the tail,
  the end of the chain first. So a block always goes before the one it follows.
- A hit is whole blocks and never the whole prompt: the last token must be computed to have its logits.
- When blocks are short nothing changes at all.

Time is an argument (``now``, seconds on any one monotonic clock). Nothing here is thread-safe: one thread owns it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from cache.block_hash import ROOT_KEY, BlockChain, BlockHash, HashScheme, TokenIds, as_token_array, index_key
from cache.events import Cleared, Event, EventBatch, RemovalReason, Removed, Snapshot, Stored

RequestId: TypeAlias = Hashable


class SlotCopy(NamedTuple):
    """Copy the KV of the first ``num_tokens`` slots of block ``source`` to the same slots of block ``target``."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request got.

    ``num_cached_tokens`` need no computing. ``block_ids`` is the request's live table: ``append`` makes it longer,
    nothing ever changes an entry. ``copies`` must be done before the request's first step.
    """

    num_cached_tokens: int
    block_ids: list[int]
    copies: tuple[SlotCopy, ...] = ()


@dataclass(slots=True)
class CacheStats:
    """Counters since the start, in tokens unless they say blocks. A hit is counted at first admission only."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_synthetic_tokens: int = 0
    num_evicted_blocks: int = 0


@dataclass(slots=True)
class _Running:
    chain: BlockChain
    block_ids: list[int]
    num_committed: int
    num_prompt_blocks: int
    pending: set[BlockHash] = field(default_factory=set)


class PrefixCache:
    """See the module. ``num_blocks`` counts block 0, so ``num_blocks - 1`` can be used.

    With ``enabled=False`` it allocates and frees, looks nothing up, keeps nothing and reports nothing.
    """

    def __init__(
        self, num_blocks: int, scheme: HashScheme, enabled: bool = True, *, replica: str = "", generation: str = ""
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} blocks leave none beside block 0")
        self.num_blocks = num_blocks
        self.scheme = scheme
        self.enabled = enabled
        self.replica = replica
        self.generation = generation
        self.stats = CacheStats()
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._copies: dict[BlockHash, dict[int, None]] = {}
        self._parent_of: dict[BlockHash, BlockHash] = {}
        self._running: dict[RequestId, _Running] = {}
        self._being_computed: dict[BlockHash, int] = {}
        self._preempted: dict[RequestId, None] = {}
        self._events: list[Event] = []
        self._first_seq = 1

    # Looking

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request uses, cached ones included: what can be allocated."""
        return len(self._queue)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that running requests use."""
        return self.num_blocks - 1 - len(self._queue)

    @property
    def num_cached_blocks(self) -> int:
        """Different block hashes that can be found: what the router's index holds of this replica."""
        return len(self._copies)

    @property
    def last_seq(self) -> int:
        """The number of the last event made, taken or not; 0 before the first."""
        return self._first_seq + len(self._events) - 1

    def num_tokens(self, request_id: RequestId) -> int:
        """Tokens of a running request, prompt and output."""
        return len(self._running[request_id].chain)

    def match(self, chain: BlockChain) -> int:
        """Tokens of ``chain`` that would be hits now: whole blocks, less than all. Changes nothing."""
        return self._match(chain) * self.scheme.block_size

    def pending(self, chain: BlockChain) -> int:
        """Tokens (whole blocks) after the match that running requests are computing right now.

        A scheduler may hold ``chain`` back until they are committed instead of computing them a second time.
        """
        if not self.enabled:
            return 0
        start = block = self._match(chain)
        for block_hash in chain.hashes[start : self._max_hit_blocks(chain)]:
            if block_hash not in self._being_computed:
                break
            block += 1
        return (block - start) * self.scheme.block_size

    # Changing

    def admit(
        self, request_id: RequestId, chain: BlockChain, now: float = 0.0, *, synthetic: bool = False
    ) -> Admission | None:
        """Take the cached front of ``chain`` and allocate blocks for the rest of it; None (no change) when short.

        The table covers all of ``len(chain)`` tokens. Nothing new is visible to others before ``commit``. The chain
        belongs to the cache from here on: ``append`` extends it. ``synthetic`` traffic is counted apart.
        Raises ``ValueError`` for an empty chain, one of another scheme, or an id that is running already.
        """
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is running already")
        if not len(chain):
            raise ValueError(f"request {request_id!r} has no tokens")
        if chain.scheme is not self.scheme and chain.scheme.fingerprint() != self.scheme.fingerprint():
            raise ValueError(f"request {request_id!r} is hashed by {chain.scheme}, this cache by {self.scheme}")
        hashes = chain.hashes
        num_hit = self._match(chain)
        hits = [next(iter(self._copies[block_hash])) for block_hash in hashes[:num_hit]]
        num_new = -(-len(chain) // self.scheme.block_size) - num_hit
        num_idle_hits = sum(not self._references[block] for block in hits)
        if num_new > len(self._queue) - num_idle_hits:
            return None
        for block in hits:
            if not self._references[block]:
                del self._queue[block]
            self._references[block] += 1
        table = hits + self._pop(num_new)
        running = _Running(chain, table, num_hit, len(hashes))
        if self.enabled:
            for block_hash in hashes[num_hit:]:
                self._being_computed[block_hash] = self._being_computed.get(block_hash, 0) + 1
        self._running[request_id] = running
        num_cached = num_hit * self.scheme.block_size
        self._count(request_id, len(chain), num_cached, synthetic)
        return Admission(num_cached, table)

    def append(self, request_id: RequestId, token_ids: TokenIds, now: float = 0.0) -> bool:
        """Extend the request's chain by output tokens, with new blocks as they begin; False (no change) when short."""
        running = self._running[request_id]
        tokens = as_token_array(token_ids)
        num_new = -(-(len(running.chain) + len(tokens)) // self.scheme.block_size) - len(running.block_ids)
        if num_new > len(self._queue):
            return False
        running.chain.extend(tokens)
        if num_new > 0:
            running.block_ids += self._pop(num_new)
        return True

    def commit(self, request_id: RequestId, num_computed: int) -> None:
        """The KV of the request's first ``num_computed`` tokens is in place: its full blocks become visible.

        Call it when the step that computed them has been launched in an order that puts every later reader after
        it. Never goes back: a smaller number than before changes nothing.
        Raises ``ValueError`` for more tokens than the request has.
        """
        running = self._running[request_id]
        if num_computed > len(running.chain):
            raise ValueError(f"{num_computed} tokens computed of {len(running.chain)} in request {request_id!r}")
        start, end = running.num_committed, num_computed // self.scheme.block_size
        if not self.enabled or end <= start:
            return
        running.num_committed = end
        hashes = running.chain.hashes
        parent = hashes[start - 1] if start else self.scheme.root
        for block in range(start, end):
            block_hash = hashes[block]
            if block < running.num_prompt_blocks:
                self._stop_computing(block_hash)
            block_id = running.block_ids[block]
            self._hash_of[block_id] = block_hash
            copies = self._copies.get(block_hash)
            if copies is None:
                self._copies[block_hash] = {block_id: None}
                self._parent_of[block_hash] = parent
                self._report_stored(parent, block_hash)
            else:
                copies[block_id] = None
            parent = block_hash

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
        if recompute:
            self._preempted[request_id] = None
        if self.enabled:
            for block_hash in running.chain.hashes[running.num_committed : running.num_prompt_blocks]:
                self._stop_computing(block_hash)
        bare: list[int] = []
        for block in reversed(running.block_ids):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hash_of[block] is None:
                bare.append(block)
            else:
                self._queue[block] = None
        for block in reversed(bare):
            self._queue[block] = None
            self._queue.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget every cached block; False (no change) while a request is running."""
        if self._running:
            return False
        if not self.enabled:
            return True
        self._hash_of = [None] * self.num_blocks
        self._copies.clear()
        self._parent_of.clear()
        self._events.append(Cleared())
        return True

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
        """All findable blocks as runs in chain order, at ``last_seq``. Costs time linear in their number."""
        children: dict[BlockHash, list[BlockHash]] = {}
        for block_hash, parent in self._parent_of.items():
            children.setdefault(parent, []).append(block_hash)
        runs: list[Stored] = []
        heads = [(self.scheme.root, child) for child in children.get(self.scheme.root, ())]
        while heads:
            parent, block_hash = heads.pop()
            keys = array("Q")
            while True:
                keys.append(index_key(block_hash))
                following = children.get(block_hash, ())
                if len(following) != 1:
                    break
                block_hash = following[0]
            runs.append(Stored(self._key_of(parent), keys))
            heads += [(block_hash, child) for child in following]
        return Snapshot(self.replica, self.generation, self.last_seq, tuple(runs))

    def free_queue(self) -> list[int]:
        """The blocks that can be allocated, next to be taken first."""
        return list(self._queue)

    def cached_block_hashes(self) -> dict[int, BlockHash]:
        """Block id to hash, for every block that carries one."""
        return {block: block_hash for block, block_hash in enumerate(self._hash_of) if block_hash is not None}

    def check_invariants(self) -> None:
        """Raises ``AssertionError`` when anything here contradicts anything else. Linear; for tests."""
        counted = [0] * self.num_blocks
        for running in self._running.values():
            assert len(set(running.block_ids)) == len(running.block_ids)
            for block in running.block_ids:
                counted[block] += 1
        assert counted == self._references
        assert set(self._queue) == {block for block in range(1, self.num_blocks) if not counted[block]}
        copies: dict[BlockHash, set[int]] = {}
        for block, block_hash in enumerate(self._hash_of):
            if block_hash is not None:
                copies.setdefault(block_hash, set()).add(block)
        assert copies == {block_hash: set(blocks) for block_hash, blocks in self._copies.items()}
        assert set(self._parent_of) == set(copies)
        for parent in self._parent_of.values():
            assert parent == self.scheme.root or parent in copies, "a cached block outlived its parent"

    # Inside

    def _max_hit_blocks(self, chain: BlockChain) -> int:
        return max(0, len(chain) - 1) // self.scheme.block_size

    def _match(self, chain: BlockChain) -> int:
        if not self.enabled:
            return 0
        count = 0
        for block_hash in chain.hashes[: self._max_hit_blocks(chain)]:
            if block_hash not in self._copies:
                break
            count += 1
        return count

    def _pop(self, count: int) -> list[int]:
        """The next ``count`` blocks of the queue; what they cached is evicted."""
        blocks = []
        removed = array("Q")
        for _ in range(count):
            block, _none = self._queue.popitem(last=False)
            block_hash = self._hash_of[block]
            if block_hash is not None:
                self._hash_of[block] = None
                self.stats.num_evicted_blocks += 1
                copies = self._copies[block_hash]
                del copies[block]
                if not copies:
                    del self._copies[block_hash], self._parent_of[block_hash]
                    removed.append(index_key(block_hash))
            self._references[block] = 1
            blocks.append(block)
        if removed:
            self._events.append(Removed(removed, RemovalReason.EVICTED))
        return blocks

    def _stop_computing(self, block_hash: BlockHash) -> None:
        left = self._being_computed[block_hash] - 1
        if left:
            self._being_computed[block_hash] = left
        else:
            del self._being_computed[block_hash]

    def _report_stored(self, parent: BlockHash, block_hash: BlockHash) -> None:
        """One more stored block: it lengthens the last event if it follows it."""
        last = self._events[-1] if self._events else None
        parent_key = self._key_of(parent)
        if isinstance(last, Stored) and last.keys[-1] == parent_key:
            last.keys.append(index_key(block_hash))
        else:
            self._events.append(Stored(parent_key, array("Q", [index_key(block_hash)])))

    def _key_of(self, block_hash: BlockHash) -> int:
        return ROOT_KEY if block_hash == self.scheme.root else index_key(block_hash)

    def _count(self, request_id: RequestId, num_tokens: int, num_cached: int, synthetic: bool) -> None:
        if request_id in self._preempted:
            del self._preempted[request_id]
            self.stats.num_recomputed_tokens += num_tokens - num_cached
        elif synthetic:
            self.stats.num_synthetic_tokens += num_tokens
        elif self.enabled:
            self.stats.num_query_tokens += num_tokens
            self.stats.num_hit_tokens += num_cached
