"""What goes into the engine and what comes out of it: plain data, made by one thread and read by another."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from cache.adapter import Adapter
from cache.events import EventBatch
from cache.retention import Retention
from cache.stats import CacheStats
from worker.batch import SamplingParams, TokenLogprobs


class Failure(Enum):
    """Why a request ended without its whole answer."""

    DEADLINE = "deadline exceeded"
    POISONED = "the model failed on this request"
    STOPPED = "the engine has stopped"


OUTCOMES = ("stop", "length", "cancelled", *(failure.name.lower() for failure in Failure))
"""How a choice ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked request. ``sampling.seed`` is that of choice 0; the others derive theirs from it."""

    id: str  # the client's; need not be unique
    token_ids: array[int]  # typecode "i": the prompt and, at its end, num_prior_output_tokens of another replica
    sampling: SamplingParams
    max_tokens: int  # prior ones included
    min_tokens: int = 0
    num_choices: int = 1
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_prompt_logprobs: int | None = None
    adapter: Adapter | None = None  # a loaded one
    cache_salt: str | None = None
    tenant: str = ""
    retention: tuple[Retention, ...] = ()
    priority: int = 0
    deadline_s: float = math.inf  # time.monotonic()
    synthetic: bool = False
    num_prior_output_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Piece:
    """What one step added to one choice. ``finish_reason`` is empty while it runs."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str = ""
    stop_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a request ended: with all its choices, or with a ``failure``."""

    num_cached_tokens: int | None  # None: it never got blocks
    num_output_tokens: int  # of all choices, prior ones included
    last_event_seq: int
    output_keys: array[int]  # index keys of the blocks that output tokens completed
    failure: Failure | None = None
    detail: str = ""


Sink = Callable[[Piece | Ending], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request got its blocks for the first time."""

    queue_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    synthetic: bool
    num_host_tokens: int = 0  # of the cached ones, what came back from host memory


@dataclass(slots=True)
class StepReport:
    """All that happened since the last report, for the event loop."""

    deliveries: list[tuple[Sink, Piece | Ending]] = field(default_factory=list)
    events: EventBatch | None = None
    admitted: list[Admitted] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)  # user traffic, queueing included
    token_gaps_s: list[float] = field(default_factory=list)  # between two tokens of one choice, user traffic
    num_preemptions: int = 0
    num_output_tokens: int = 0  # user traffic
    outcomes: list[str] = field(default_factory=list)  # of choices that ended, user traffic: see OUTCOMES
    prefill_steps_s: list[float] = field(default_factory=list)  # steps that read prompts, and may decode beside
    decode_steps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """The engine's view of its load and cache, a fraction of a second old at most."""

    waiting: int = 0  # choices without a first token
    running: int = 0  # choices with one
    waiting_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0  # different block hashes on the device
    num_host_blocks: int = 0
    num_host_cached_blocks: int = 0  # different block hashes in host memory
    lru_age_s: float = 0.0  # idle time of the block that would be lost next; 0 while empty ones remain
    last_event_seq: int = 0
    stats: CacheStats = field(default_factory=CacheStats)
