"""One replica under a virtual clock: the worker's own scheduler and prefix cache, and steps that only take their time.

A step takes its prompt tokens' time, that of what comes back from host memory, and ``decode_s`` once when any answer
grows: as the simulated engine's do, so that a run over the wire comes to the same. Steps that only make answers longer
while nobody waits are taken together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cache.block_hash import HashScheme
from cache.events import EventBatch, Tier
from cache.prefix_cache import PrefixCache
from warmfront.replay.settings import Settings
from warmfront.replay.trace import Job
from worker.batch import SamplingParams
from worker.scheduler import Choice, ChoiceState, Limits, Scheduler, Step

_UNBOUNDED = 1 << 60
_SAMPLING = SamplingParams()


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way."""

    number: int
    job: Job
    sent_s: float
    num_drawn: int = 0
    num_cached: int = 0  # of its prompt's tokens, once it has its first token

    @property
    def num_left(self) -> int:
        """Tokens of its answer that are not drawn yet."""
        return self.job.turn.num_output_tokens - self.num_drawn


@dataclass(slots=True)
class StepResult:
    """What came of a step, or of several."""

    begun: list[Flight]  # got their first tokens
    ended: list[Flight]
    events: EventBatch | None


class Replica:
    """Its cache and its queue belong to it alone. ``ends_at_s``: when the step under way ends; None: nothing to do."""

    def __init__(self, name: str, number: int, scheme: HashScheme, settings: Settings) -> None:
        self.name = name
        self.number = number
        self.cache = PrefixCache(
            settings.kv_blocks + 1, scheme, replica=name, generation="0", num_host_blocks=settings.host_kv_blocks
        )
        self.num_computed_tokens = 0  # of prompts
        self._computed_s = 0.0  # the steps that did that took so long
        self.ends_at_s: float | None = None
        step_tokens = max(settings.max_num_batched_tokens, settings.max_num_seqs)
        self._settings = settings
        self._scheduler = Scheduler(self.cache, Limits(settings.max_num_seqs, step_tokens, _UNBOUNDED))
        self._flights: dict[str, tuple[Flight, Choice]] = {}
        self._step: Step | None = None  # under way
        self._began_at_s = 0.0
        self._num_steps = 0  # over 0: so many are under way that only make answers longer

    @property
    def prefill_tokens_per_s(self) -> float:
        """What its lease says of its speed; 0 before it has computed anything."""
        return self.num_computed_tokens / self._computed_s if self._computed_s else 0.0

    def add(self, flight: Flight, now: float) -> None:
        """A request has arrived: it joins the next step."""
        choice = Choice(
            id=str(flight.number),
            chain=flight.job.chain(self.cache.scheme),
            prompt_token_ids=(),
            output_token_ids=[],
            sampling=_SAMPLING,
            arrival_s=now,
        )
        self._flights[choice.id] = flight, choice
        self._scheduler.add(choice, self._settings.prefill_tokens_per_s)
        if self.ends_at_s is None:
            self.begin(now)
        elif self._num_steps:  # of several steps under way the others come after the one that is being taken
            step_s = self._settings.decode_s
            done = int((now - self._began_at_s) / step_s) + 1 if step_s else self._num_steps
            self._num_steps = min(done, self._num_steps)
            self.ends_at_s = self._began_at_s + self._num_steps * step_s

    def begin(self, now: float) -> None:
        """Begin the next step, where there is anything to do."""
        self._began_at_s = now
        self._num_steps = self._num_alike()
        if self._num_steps:
            self.ends_at_s = now + self._num_steps * self._settings.decode_s
            return
        step = self._scheduler.schedule(now)
        if not step.choices:
            self._step = self.ends_at_s = None
            return
        self._step = step
        num_tokens = sum(len(piece.token_ids) for piece in step.slices)
        num_host_tokens = sum(
            len(some.sources) * some.num_tokens
            for some in self.cache.take_copies()
            if some.source_tier is Tier.HOST and some.target_tier is Tier.DEVICE
        )
        took_s = step.num_prefill_tokens / self._settings.prefill_tokens_per_s
        took_s += num_host_tokens / self._settings.host_tokens_per_s
        if num_tokens > step.num_prefill_tokens:
            took_s += self._settings.decode_s
        if step.num_prefill_tokens:
            self.num_computed_tokens += step.num_prefill_tokens
            self._computed_s += took_s
        self.ends_at_s = now + took_s

    def end(self, now: float) -> StepResult:
        """The step under way has ended. ``begin`` the next one."""
        result = StepResult([], [], None)
        if self._num_steps:
            self._lengthen(self._num_steps, now)
        elif self._step is not None:
            self._take(self._step, result, now)
        self._step, self._num_steps, self.ends_at_s = None, 0, None
        result.events = self.cache.take_events()
        return result

    def _take(self, step: Step, result: StepResult, now: float) -> None:
        for choice, piece in zip(step.choices, step.slices, strict=True):
            self._scheduler.computed(choice, piece)
            if piece.sampling is None:  # it does not reach the prompt's end
                continue
            flight, _ = self._flights[choice.id]
            flight.num_drawn += 1
            if flight.num_drawn == 1:
                assert choice.num_cached is not None
                flight.num_cached = choice.num_cached
                result.begun.append(flight)
            if flight.num_left:
                self._scheduler.draw(choice, 0)
            else:
                self._scheduler.finish(choice, now)
                del self._flights[choice.id]
                result.ended.append(flight)

    def _num_alike(self) -> int:
        """So many steps from here make every answer longer by a token and do nothing else; 0: not even two."""
        if self._scheduler.num_waiting or not self._flights:
            return 0
        if any(choice.drawn is None for _, choice in self._flights.values()):
            return 0
        count = min(flight.num_left for flight, _ in self._flights.values()) - 1  # the last one ends an answer
        blocks_at_most = len(self._flights) * (count // self.cache.scheme.block_size + 1)
        return count if count > 1 and blocks_at_most <= self.cache.num_free_blocks else 0

    def _lengthen(self, count: int, now: float) -> None:
        tokens = np.zeros(count, dtype=np.int32)
        for flight, choice in self._flights.values():
            if choice.state is not ChoiceState.RUNNING:  # it has come meanwhile
                continue
            is_appended = self.cache.append(choice.id, tokens, now)
            assert is_appended, "there was room"
            choice.num_computed += count
            self.cache.commit(choice.id, choice.num_computed)
            flight.num_drawn += count
