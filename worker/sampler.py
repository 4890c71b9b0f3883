"""From scores to tokens: stateless, vectorised, and the same whatever else is in the batch.

A draw is a function of (seed, position): a counter-based hash gives the uniform number, the inverse of the cumulated
distribution gives the token. So neither a preemption nor another replica changes what a seed yields.

Every reduction here runs along one row in a fixed order (softmax and cumsum never split a row among threads), which is
what keeps a draw independent of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.batch import SamplingParams, SequenceSlice, TokenLogprobs
from worker.seen_tokens import SeenTokens
from worker.splitmix import MASK, STEP, mix

# How many of the likeliest tokens top-k and top-p look at: the first width that holds what they keep, then the whole
# vocabulary. For 32 rows of 49,152 on one core: 4, 14 and 104 ms.
WIDTHS = (128, 1024)
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None


def sample(logits: Tensor, slices: Sequence[SequenceSlice]) -> list[Draw]:
    """One token per row of ``logits`` (float32 ``[len(slices), vocab]``, kept unchanged).

    Each slice has ``sampling`` set; the token drawn stands at position ``start + len(token_ids)``. Log-probabilities
    are of the model's own distribution, before penalties and temperature.
    """
    params = [one.sampling for one in slices]
    assert all(one is not None for one in params)
    wanted: list[SamplingParams] = [one for one in params if one is not None]
    adjusted = _adjust(logits, slices, wanted)
    token_ids = adjusted.argmax(dim=-1)
    random_rows = [row for row, one in enumerate(wanted) if one.temperature > 0]
    if random_rows:
        chosen = [wanted[row] for row in random_rows]
        uniforms = [uniform(wanted[row].seed, slices[row].start + len(slices[row].token_ids)) for row in random_rows]
        index = torch.tensor(random_rows, device=logits.device)
        rows = adjusted if len(random_rows) == len(wanted) else adjusted.index_select(0, index)
        token_ids[index] = _draw(rows, chosen, uniforms)
    ids = token_ids.tolist()
    logprobs: dict[int, TokenLogprobs] = {}
    if asking := [row for row, one in enumerate(wanted) if one.num_logprobs is not None]:
        counts = [wanted[row].num_logprobs or 0 for row in asking]
        found = token_logprobs(logits[asking], [ids[row] for row in asking], counts)
        logprobs = dict(zip(asking, found, strict=True))
    return [Draw(token_id, logprobs.get(row)) for row, token_id in enumerate(ids)]


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row: the log-probability and rank of its token, and the ``num_top`` likeliest tokens."""
    scores = torch.log_softmax(logits, dim=-1)
    ids = torch.tensor(token_ids, device=logits.device)
    own = scores.gather(1, ids[:, None])
    ranks = ((scores > own).sum(dim=-1) + 1).tolist()
    best, best_ids = scores.topk(min(max(num_top), scores.shape[1]), dim=-1)
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=tuple(zip(ids_row[:n], row[:n], strict=True)))
        for token_id, logprob, rank, n, ids_row, row in zip(
            token_ids, own[:, 0].tolist(), ranks, num_top, best_ids.tolist(), best.tolist(), strict=True
        )
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    mixed = mix((mix(seed & MASK) + (position + 1) * STEP) & MASK)
    return (mixed >> 11) * 2.0**-53


def _adjust(logits: Tensor, slices: Sequence[SequenceSlice], params: Sequence[SamplingParams]) -> Tensor:
    """Bias, penalties and bans; a copy only where some row needs one."""
    adjusted = logits
    for row, (one, sampling) in enumerate(zip(slices, params, strict=True)):
        if not (one.seen is not None or sampling.logit_bias or one.forbidden_token_ids):
            continue
        if adjusted is logits:
            adjusted = logits.clone()
        scores = adjusted[row]
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=scores.device)
            scores[ids] += torch.tensor(list(sampling.logit_bias.values()), device=scores.device)
        if one.seen is not None:
            _penalise(scores, one.seen, sampling)
        if one.forbidden_token_ids:
            scores[torch.tensor(list(one.forbidden_token_ids), device=scores.device)] = _NEVER
    return adjusted


def _penalise(scores: Tensor, seen: SeenTokens, sampling: SamplingParams) -> None:
    ids = torch.from_numpy(seen.ids).to(scores.device)
    values = scores[ids]
    if sampling.repetition_penalty != 1.0:  # Keskar et al. 2019 (CTRL): of what was read and written
        values = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:  # OpenAI's: of what was written
        counts = torch.from_numpy(seen.counts).to(scores.device)
        values = values - (sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts)
    scores[ids] = values


def _draw(scores: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Token ids ``[rows]``: temperature, then min-p, then top-k, then top-p, each on what the one before left."""
    device = scores.device
    scores = scores / torch.tensor([one.temperature for one in params], device=device)[:, None]
    if any(one.min_p > 0 for one in params):
        floor = torch.tensor([one.min_p for one in params], device=device).log()
        scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + floor[:, None], _NEVER)
    probabilities = torch.softmax(scores, dim=-1)
    u = torch.tensor(uniforms, dtype=torch.float64, device=device)
    vocab = scores.shape[1]
    limited = [row for row, one in enumerate(params) if one.top_p < 1 or 0 < one.top_k < vocab]
    if not limited:
        return _invert(probabilities, u)
    token_ids = torch.empty(len(params), dtype=torch.int64, device=device)
    if free := sorted(set(range(len(params))) - set(limited)):
        token_ids[free] = _invert(probabilities[free], u[free])
    waiting = limited
    for width in (*(width for width in WIDTHS if width < vocab), vocab):
        now = [row for row in waiting if params[row].top_k <= width or params[row].top_k >= vocab]
        if now:
            token_ids[now], short = _draw_limited(probabilities[now], u[now], [params[row] for row in now], width)
            done = {row for row, is_short in zip(now, short, strict=True) if not is_short}
            waiting = [row for row in waiting if row not in done]
    return token_ids


def _draw_limited(
    probabilities: Tensor, u: Tensor, params: Sequence[SamplingParams], width: int
) -> tuple[Tensor, list[bool]]:
    """Token ids of rows with top-k or top-p, looking at the ``width`` likeliest; and which rows need to see more."""
    device, vocab = probabilities.device, probabilities.shape[1]
    best, best_ids = probabilities.topk(width, dim=-1)
    cumulated = best.cumsum(dim=-1, dtype=torch.float64)
    k = torch.tensor([one.top_k if 0 < one.top_k < vocab else vocab for one in params], device=device)[:, None]
    last = k.clamp(max=width) - 1
    # Top-p is a share of what top-k left; without top-k, of everything.
    mass = torch.where(k < vocab, cumulated.gather(1, last), 1.0)
    target = torch.tensor([one.top_p for one in params], dtype=torch.float64, device=device)[:, None] * mass
    short = (cumulated[:, -1:] < target) & (width < vocab)
    last = torch.minimum(last, (cumulated < target).sum(dim=-1, keepdim=True))  # the first to reach the target is kept
    kept = cumulated.gather(1, last)
    chosen = torch.minimum(torch.searchsorted(cumulated, u[:, None] * kept, right=True), last)
    return best_ids.gather(1, chosen)[:, 0], short[:, 0].tolist()


def _invert(probabilities: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulated probability exceeds ``u`` of the whole."""
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)
    found = torch.searchsorted(cumulated, u[:, None] * cumulated[:, -1:], right=True)
    return found.clamp_(max=probabilities.shape[1] - 1)[:, 0]
