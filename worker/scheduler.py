"""Which tokens the next step computes: continuous batching under a token budget.

Each step takes one token of every request that decodes, then chunks of prompts, begun ones and waiting ones in one
order, while budget and blocks last. Decisions only: it knows no model, no clock and no thread. What a step drew comes
back through ``draw`` and ``finish``.

The order is that of when each prompt would be done if it had been computed alone since it came: its arrival and the
time that its missing tokens take. So what is found in the cache does not wait behind a long cold prompt, and a prompt
is overtaken by none that comes later than it takes itself. Where the speed is not known yet it is first come, first
served. Priority shifts it.

When blocks run out the youngest running choice is preempted: its blocks go, its tokens stay, and it is computed again
later. The oldest is never a victim, so something always ends and nothing starves.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from cache.block_hash import BlockChain
from cache.prefix_cache import PrefixCache
from cache.retention import Retention
from worker.batch import SamplingParams, SequenceSlice
from worker.seen_tokens import SeenTokens

PRIORITY_S = 10.0
"""One step of priority is worth so many seconds of waiting: lower runs earlier."""
MAX_PRIORITY = 10
"""What is asked beyond this, either way, counts as this: so nobody waits for ever, whatever others ask."""


class QueueFullError(Exception):
    """As many requests wait as may. Retrying later, or elsewhere, may help."""


class ChoiceState(Enum):
    """Where a choice stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One answer being made to a request: the unit that is scheduled.

    Its chain holds all tokens but the last drawn one, which joins when it is about to be computed: the last token of
    an answer never is, so it takes no slot.
    """

    id: str
    chain: BlockChain
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]  # drawn so far, those of an earlier replica included
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0
    deadline_s: float = math.inf  # on the clock of ``now``
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()  # forbidden before min_tokens
    num_prompt_logprobs: int | None = None
    lora: str | None = None  # identity of its adapter
    synthetic: bool = False
    tenant: str = ""
    retention: Sequence[Retention] = ()

    state: ChoiceState = ChoiceState.WAITING
    num_computed: int = 0  # tokens whose KV is in place
    num_cached: int | None = None  # at first admission; None before it
    num_from_host: int = 0  # of these, what came back from host memory
    num_preemptions: int = 0
    drawn: int | None = None  # the last token, not yet in the chain
    block_ids: Sequence[int] = ()
    order: tuple[float, int] = (0.0, 0)
    seen: SeenTokens | None = None  # where its sampling penalises, from its first admission on


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step and the queue."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue: int


@dataclass(slots=True)
class Step:
    """What one step computes: a slice of each of some choices, decode rows first."""

    choices: list[Choice] = field(default_factory=list)
    slices: list[SequenceSlice] = field(default_factory=list)
    admitted: list[Choice] = field(default_factory=list)  # those of them that got blocks for the first time
    num_prefill_tokens: int = 0


class Scheduler:
    """Owns who waits and who runs, and drives the prefix cache. See the module. One thread owns it."""

    def __init__(self, cache: PrefixCache, limits: Limits) -> None:
        if limits.max_num_seqs > limits.max_num_batched_tokens:
            raise ValueError(f"a step of {limits.max_num_batched_tokens} tokens cannot hold {limits.max_num_seqs} rows")
        self._cache = cache
        self._limits = limits
        self._waiting: list[Choice] = []  # in order
        self._running: list[Choice] = []  # in order: the youngest is last
        self._next_deadline_s = math.inf
        self._num_arrived = 0
        self.num_preemptions = 0

    # Looking

    @property
    def num_waiting(self) -> int:
        """Choices without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Choices with blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        return bool(self._waiting or self._running)

    def waiting_tokens(self) -> int:
        """Tokens to compute before every choice that has none gets its first token, known hits aside.

        What several of them begin with is computed once, and counts once. A few microseconds per choice.
        """
        block_size = self._cache.scheme.block_size
        total = 0
        heads: dict[int, array[int]] = {}  # by its first key that nobody before had: a chain from there on
        for choice in (*self._running, *self._waiting):
            if choice.drawn is not None:
                continue
            keys = choice.chain.keys
            is_running = choice.state is ChoiceState.RUNNING
            reuse = self._cache.enabled and choice.num_prompt_logprobs is None
            num_done = choice.num_computed if is_running else self._cache.match(choice.chain) if reuse else 0
            at = num_done // block_size
            while reuse and at < len(keys) and (other := heads.get(keys[at])) is not None:
                at = _end_of_common(keys, other, at + 1)
            if at < len(keys):
                heads.setdefault(keys[at], keys)
            if reuse and not is_running:
                num_done = max(num_done, min(at, (len(choice.chain) - 1) // block_size) * block_size)
            total += len(choice.chain) - num_done
        return total

    def check_room(self, num_more: int) -> None:
        """Raises ``QueueFullError`` when ``num_more`` choices cannot wait here."""
        if len(self._waiting) + num_more > self._limits.max_queue:
            raise QueueFullError(f"{len(self._waiting)} of {self._limits.max_queue} places in the queue are taken")

    # Changing

    def add(self, choice: Choice, prefill_tokens_per_s: float = 0.0) -> None:
        """Queue a new choice. The caller has checked that its tokens fit the pool, and ``check_room``.

        ``prefill_tokens_per_s``: how fast prompts are computed here; 0 where nobody knows yet.
        """
        self._num_arrived += 1
        done_s = choice.arrival_s
        if prefill_tokens_per_s:
            num_cached = self._cache.match(choice.chain) if choice.num_prompt_logprobs is None else 0
            done_s += (len(choice.chain) - num_cached) / prefill_tokens_per_s
        priority = max(-MAX_PRIORITY, min(choice.priority, MAX_PRIORITY))
        choice.order = (done_s + PRIORITY_S * priority, self._num_arrived)
        insort(self._waiting, choice, key=_order)
        self._next_deadline_s = min(self._next_deadline_s, choice.deadline_s)

    def expired(self, now: float) -> list[Choice]:
        """The choices whose deadline has passed; the caller ends them. Looks through all only when one may have."""
        if now < self._next_deadline_s:
            return []
        everyone = self._waiting + self._running
        self._next_deadline_s = min((one.deadline_s for one in everyone if one.deadline_s > now), default=math.inf)
        return [one for one in everyone if one.deadline_s <= now]

    def schedule(self, now: float) -> Step:
        """The next step, decode rows first. Empty only when nothing is left to do.

        Every choice in it has its blocks. When the step has run, call ``computed`` for each of its slices.
        """
        preemptions_before = self.num_preemptions
        step = Step()
        prefilling = self._decode_rows(step, now)
        budget = self._limits.max_num_batched_tokens - len(step.slices)
        has_room = self.num_preemptions == preemptions_before
        for choice in prefilling:
            if has_room:
                budget, has_room = self._admit(budget, step, now, before=choice.order)
            if budget and choice.state is ChoiceState.RUNNING:  # not preempted for a row a moment ago
                budget -= self._add_chunk(choice, budget, step)
        if has_room:
            self._admit(budget, step, now)
        return step

    def computed(self, choice: Choice, piece: SequenceSlice) -> None:
        """A slice has run: its KV is in place, and blocks that are full now become visible."""
        block_size = self._cache.scheme.block_size
        before = choice.num_computed
        choice.num_computed = before + len(piece.token_ids)
        if choice.num_computed // block_size > before // block_size:
            self._cache.commit(choice.id, choice.num_computed)

    def draw(self, choice: Choice, token_id: int) -> None:
        """A running choice got its next token and goes on."""
        choice.output_token_ids.append(token_id)
        choice.drawn = token_id
        if choice.seen is not None:
            choice.seen.add(token_id)

    def finish(self, choice: Choice, now: float) -> None:
        """A choice ends, for whatever reason and in whatever state; what it computed stays cached. Twice is once."""
        if choice.state is ChoiceState.WAITING:
            self._waiting.remove(choice)
            if choice.num_preemptions:
                self._cache.free(choice.id, now)
        elif choice.state is ChoiceState.RUNNING:
            self._running.remove(choice)
            self._cache.commit(choice.id, choice.num_computed)
            self._cache.free(choice.id, now)
        choice.state = ChoiceState.ENDED

    def check_invariants(self) -> None:
        """Raises ``AssertionError`` when anything here contradicts anything else. For tests."""
        for queue, state in ((self._waiting, ChoiceState.WAITING), (self._running, ChoiceState.RUNNING)):
            assert queue == sorted(queue, key=_order)
            assert all(one.state is state for one in queue)
        assert len(self._running) <= self._limits.max_num_seqs
        assert self._running or not self._cache.num_used_blocks

    # Inside

    def _decode_rows(self, step: Step, now: float) -> list[Choice]:
        """Put a row for each choice with a drawn token into the step; the choices that still read their prompt."""
        prefilling: list[Choice] = []
        running = self._running
        index = 0
        while index < len(running):
            choice = running[index]
            index += 1
            token_id = choice.drawn
            if token_id is None:
                prefilling.append(choice)
                continue
            # Victims come from the end, so none of them has its row yet.
            while choice.state is ChoiceState.RUNNING and not self._cache.append(choice.id, (token_id,), now):
                self._preempt(running[-1], now)
            if choice.state is ChoiceState.RUNNING:
                choice.drawn = None
                step.choices.append(choice)
                step.slices.append(self._slice(choice, 1, (token_id,)))
        return prefilling

    def _add_chunk(self, choice: Choice, budget: int, step: Step) -> int:
        """Put the next chunk of a prompt into the step; its size in tokens."""
        start = choice.num_computed
        size = min(budget, len(choice.chain) - start)
        step.choices.append(choice)
        step.slices.append(self._slice(choice, size, choice.chain.token_ids[start : start + size]))
        step.num_prefill_tokens += size
        return size

    def _admit(
        self, budget: int, step: Step, now: float, before: tuple[float, int] = (math.inf, 0)
    ) -> tuple[int, bool]:
        """Give blocks and first chunks to waiting choices in order, until budget, rows or blocks are used up.

        Returns what is left of the budget, and whether all that come ``before`` fitted in.

        A choice whose next blocks are being computed for another one is passed over until they are in place. One that
        does not fit stops the rest: those behind it must not keep taking the blocks that it waits for.
        """
        index = 0
        while budget and index < len(self._waiting) and len(self._running) < self._limits.max_num_seqs:
            choice = self._waiting[index]
            if choice.order >= before:
                break
            reuse = choice.num_prompt_logprobs is None  # else every prompt token must be computed
            if reuse and self._cache.pending(choice.chain):
                index += 1
                continue
            admission = self._cache.admit(
                choice.id,
                choice.chain,
                now,
                synthetic=choice.synthetic,
                reuse=reuse,
                retention=choice.retention,
                tenant=choice.tenant,
            )
            if admission is None:
                # What it is about to hit must not be evicted meanwhile for those that run.
                self._cache.renew(choice.chain, now)
                return budget, False
            del self._waiting[index]
            insort(self._running, choice, key=_order)
            choice.state = ChoiceState.RUNNING
            choice.block_ids = admission.block_ids
            choice.num_computed = admission.num_cached_tokens
            if choice.num_cached is None:
                choice.num_cached = admission.num_cached_tokens
                choice.num_from_host = admission.num_host_tokens
                step.admitted.append(choice)
                if choice.sampling.penalises:  # not before: as much as its prompt takes, and many may wait
                    read = choice.prompt_token_ids if choice.sampling.repetition_penalty != 1.0 else ()
                    choice.seen = SeenTokens(read, choice.output_token_ids)
            budget -= self._add_chunk(choice, budget, step)
        return budget, True

    def _preempt(self, choice: Choice, now: float) -> None:
        """Take a running choice's blocks; it waits in its old place, to compute prompt and answer again."""
        self._running.remove(choice)
        self._cache.free(choice.id, now, recompute=True)
        if choice.drawn is not None:
            choice.chain.extend((choice.drawn,))
            choice.drawn = None
        choice.state = ChoiceState.WAITING
        choice.num_computed = 0
        choice.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, choice, key=_order)

    def _slice(self, choice: Choice, size: int, token_ids: Sequence[int]) -> SequenceSlice:
        start = choice.num_computed
        draws = start + size == len(choice.chain)
        output = choice.output_token_ids
        return SequenceSlice(
            request_id=choice.id,
            token_ids=token_ids,
            start=start,
            block_ids=choice.block_ids,
            sampling=choice.sampling if draws else None,
            prompt_token_ids=choice.prompt_token_ids,
            output_token_ids=output,
            seen=choice.seen,
            forbidden_token_ids=choice.end_token_ids if draws and len(output) < choice.min_tokens else (),
            num_prompt_logprobs=choice.num_prompt_logprobs,
            lora=choice.lora,
        )


def _end_of_common(keys: array[int], others: array[int], known: int) -> int:
    """How many leading keys of two chains are equal, of which so many are known to be: a key names all before it."""
    places = range(min(len(keys), len(others)))
    return bisect_left(places, True, lo=known, key=lambda place: keys[place] != others[place])


def _order(choice: Choice) -> tuple[float, int]:
    return choice.order
