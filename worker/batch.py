"""What the scheduler asks of the model in one step, and what comes back.

One step is one flat batch: the slices of several requests, decode rows and prefill chunks alike. These are plain
data, so that a scheduler test needs no model and a model test needs no scheduler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from worker.seen_tokens import SeenTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token of a request is drawn. Checked where a request enters; trusted here.

    A draw is a function of ``(seed, position)`` alone: neither the batch, nor a preemption, nor the replica changes it.
    """

    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 means all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0  # of this choice: the engine draws one where the client gives none
    num_logprobs: int | None = None  # None: no logprobs; 0: of the drawn token only

    @property
    def penalises(self) -> bool:
        """Whether a draw depends on which tokens there were before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True, kw_only=True)
class SequenceSlice:
    """One request's share of a step: ``len(token_ids)`` tokens from position ``start`` on."""

    request_id: str
    token_ids: Sequence[int]  # the tokens to compute in this step
    start: int  # position of token_ids[0]; all positions before it have their KV in place
    block_ids: Sequence[int]  # the block table; covers at least start + len(token_ids) positions
    sampling: SamplingParams | None  # None: a prefill chunk that does not reach the prompt's end, nothing is drawn
    prompt_token_ids: Sequence[int] = ()  # for prompt logprobs
    output_token_ids: Sequence[int] = ()  # what was drawn so far
    seen: SeenTokens | None = None  # where sampling penalises: what was read and drawn so far
    forbidden_token_ids: Sequence[int] = ()  # end tokens while min_tokens is not reached
    num_prompt_logprobs: int | None = None  # as num_logprobs, for the prompt positions of this slice, chunks included
    lora: str | None = None  # identity of a loaded adapter


PROBE = SequenceSlice(request_id="probe", token_ids=(0,), start=0, block_ids=(0,), sampling=GREEDY)
"""One token on the scratch block: it fails where everything would. No request's, so a fault of requests spares it."""


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """All slices of one step. Decode rows first, then prefill chunks."""

    slices: list[SequenceSlice]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step, over all slices."""
        return sum(len(one.token_ids) for one in self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token itself and of the likeliest alternatives."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: Sequence[tuple[int, float]] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceResult:
    """What came of one slice. ``error``: this slice alone failed (no finite numbers); its request ends, no other."""

    token_id: int | None = None  # None where nothing was to be drawn
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of the positions of this slice that predict a prompt token
    error: str | None = None
