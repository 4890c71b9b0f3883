"""Draws follow the distribution that the parameters describe, and nothing else."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.batch import SamplingParams, SequenceSlice
from worker.sampler import WIDTHS, Draw, sample, token_logprobs, uniform
from worker.seen_tokens import SeenTokens


def drawn(logits: torch.Tensor, params: list[SamplingParams], position: int = 1, **more: Any) -> list[Draw]:
    slices = [
        SequenceSlice(request_id="r", token_ids=[0], start=position - 1, block_ids=[1], sampling=one, **more)
        for one in params
    ]
    return sample(logits, slices)


def tokens(logits: torch.Tensor, params: list[SamplingParams], **more: Any) -> list[int]:
    return [one.token_id for one in drawn(logits, params, **more)]


def spread(row: list[float], num_draws: int = 4000, **params: Any) -> dict[int, float]:
    """How often each token comes, over many seeds."""
    logits = torch.tensor(row).repeat(num_draws, 1)
    counts = Counter(tokens(logits, [SamplingParams(seed=seed, **params) for seed in range(num_draws)]))
    return {token: count / num_draws for token, count in sorted(counts.items())}


HALVES = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().tolist()


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    assert tokens(logits, [SamplingParams(temperature=0)] * 2) == [1, 0]


def test_draws_follow_the_distribution() -> None:
    seen = spread(HALVES)
    for token, share in enumerate([0.5, 0.25, 0.125, 0.125]):
        assert seen[token] == pytest.approx(share, abs=0.03)


def test_temperature_flattens_and_sharpens() -> None:
    assert spread(HALVES, temperature=0.5)[0] == pytest.approx(0.25 / (0.25 + 0.0625 + 2 * 0.015625), abs=0.03)
    assert spread(HALVES, temperature=100.0)[3] == pytest.approx(0.25, abs=0.03)


def test_top_k_keeps_the_k_likeliest() -> None:
    seen = spread(HALVES, top_k=2)
    assert list(seen) == [0, 1]
    assert seen[0] == pytest.approx(2 / 3, abs=0.03)


def test_top_p_keeps_the_token_that_reaches_the_share_and_none_after_it() -> None:
    assert list(spread(HALVES, top_p=0.5)) == [0]
    assert list(spread(HALVES, top_p=0.51)) == [0, 1]
    assert list(spread(HALVES, top_p=0.01)) == [0]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    assert list(spread(HALVES, top_k=2, top_p=0.6)) == [0]  # 0.5 of 0.75 is 0.67 of the rest
    assert list(spread(HALVES, top_k=2, top_p=0.7)) == [0, 1]


def test_min_p_drops_what_is_far_less_likely_than_the_best() -> None:
    assert list(spread(HALVES, min_p=0.4)) == [0, 1]
    assert list(spread(HALVES, min_p=1.0)) == [0]


@pytest.mark.parametrize("width", WIDTHS)
def test_top_p_over_a_flat_vocabulary_looks_past_the_likeliest(width: int) -> None:
    row = torch.zeros(8 * width)
    row[:width] += 0.01  # slightly ahead, but an eighth of the mass
    seen = tokens(row.repeat(300, 1), [SamplingParams(seed=seed, top_p=0.9) for seed in range(300)])
    assert sum(token < width for token in seen) / 300 == pytest.approx(1 / (8 * 0.9), abs=0.08)


def test_top_k_beyond_the_first_width_is_kept_whole() -> None:
    row = torch.zeros(4 * WIDTHS[0])
    row[: 2 * WIDTHS[0]] += 1.0
    params = [SamplingParams(seed=seed, top_k=2 * WIDTHS[0], top_p=1 - seed % 2 / 1000) for seed in range(300)]
    seen = tokens(row.repeat(300, 1), params)
    assert max(seen) < 2 * WIDTHS[0]
    assert sum(token >= WIDTHS[0] for token in seen) / 300 == pytest.approx(0.5, abs=0.1)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    torch.manual_seed(0)
    row = torch.randn(1, 5000)
    params = SamplingParams(seed=42, top_p=0.95, top_k=50, temperature=0.8)
    (alone,) = tokens(row, [params], position=17)
    batch = torch.cat([torch.randn(6, 5000), row, torch.randn(2, 5000)])
    others = [SamplingParams(seed=n, top_p=1.0 if n % 2 else 0.3) for n in range(9)]
    others[6] = params
    assert tokens(batch, others, position=17)[6] == alone
    assert len({tokens(row, [params], position=position)[0] for position in range(1, 40)}) > 5


def test_uniform_numbers_are_even_and_unlike_between_neighbours() -> None:
    values = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.01)
    deciles = Counter(int(value * 10) for value in values)
    assert all(abs(count - 1000) < 150 for count in deciles.values())
    steps = [abs(uniform(1, position) - uniform(2, position)) for position in range(1000)]
    assert sum(steps) / len(steps) == pytest.approx(1 / 3, abs=0.03)
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_penalties_hit_what_was_written_and_repetition_also_what_was_read() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 1.0]])

    def first(**params: Any) -> int:
        one = SamplingParams(temperature=0, **params)
        read = [1] if one.repetition_penalty != 1 else []
        return tokens(logits, [one], seen=SeenTokens(read, [0, 0]) if one.penalises else None)[0]

    assert first() == 0
    assert first(presence_penalty=0.2) == 1
    assert first(frequency_penalty=0.06) == 1  # twice
    assert first(frequency_penalty=0.04) == 0
    assert first(repetition_penalty=1.5) == 0  # both are divided
    assert first(repetition_penalty=3.0) == 3  # until the third, which nobody saw, is ahead


@given(st.lists(st.integers(0, 40), max_size=60), st.lists(st.integers(0, 40), max_size=60), st.integers(0, 60))
def test_what_was_seen_is_counted_the_same_at_once_and_as_it_comes(
    read: list[int], written: list[int], cut: int
) -> None:
    seen = SeenTokens(read, written[:cut])
    for token_id in written[cut:]:
        seen.add(token_id)
    counts = Counter(written)
    wanted = {token_id: counts[token_id] for token_id in {*read, *written}}
    assert dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("repetition_penalty", [0.01, 10.0])
def test_the_lowest_temperature_and_the_strongest_penalties_draw_as_they_say(repetition_penalty: float) -> None:
    logits = torch.tensor([[40.0, -40.0, 30.0, 5.0]])
    one = SamplingParams(
        temperature=1e-5, repetition_penalty=repetition_penalty, presence_penalty=2, frequency_penalty=2, top_p=0.9
    )
    likeliest = 2 if repetition_penalty > 1 else 0
    assert tokens(logits, [one], seen=SeenTokens([1], [0])) == [likeliest]
    assert tokens(logits, [one], seen=SeenTokens([1, 0, 2, 3], [3])) == [0]


def test_bias_and_bans_move_the_choice() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert tokens(logits, [SamplingParams(temperature=0, logit_bias={2: 5.0})]) == [2]
    assert tokens(logits, [SamplingParams(temperature=0)], forbidden_token_ids=[0]) == [1]
    assert set(
        tokens(logits.repeat(50, 1), [SamplingParams(seed=n) for n in range(50)], forbidden_token_ids=[0, 1])
    ) == {2}
    assert logits.tolist() == [[2.0, 1.0, 0.0]]


def test_logprobs_are_of_the_model_whatever_the_sampling() -> None:
    logits = torch.tensor([HALVES])
    one = SamplingParams(temperature=0, logit_bias={3: 50.0}, num_logprobs=2)
    (draw,) = drawn(logits, [one])
    assert draw.logprobs is not None
    assert (draw.token_id, draw.logprobs.token_id, draw.logprobs.rank) == (3, 3, 3)
    assert draw.logprobs.logprob == pytest.approx(-2.0794, abs=1e-3)
    assert [token for token, _ in draw.logprobs.top] == [0, 1]
    (plain,) = drawn(logits, [SamplingParams(temperature=0, num_logprobs=0)])
    assert plain.logprobs is not None and plain.logprobs.top == ()


def test_each_row_gets_as_many_alternatives_as_it_asks_for() -> None:
    found = token_logprobs(torch.tensor([HALVES, HALVES]), [0, 1], [3, 1])
    assert [len(one.top) for one in found] == [3, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=40),
    st.floats(0.05, 3),
    st.integers(0, 45),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.integers(0, 2**63),
)
def test_only_tokens_that_every_limit_allows_are_drawn(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    (token,) = tokens(torch.tensor([row]), [params])
    shares = torch.softmax(torch.tensor(row, dtype=torch.float64) / temperature, 0)
    likelier = shares[shares > shares[token] * (1 + 1e-5)]
    if top_k:
        assert len(likelier) < top_k
    assert shares[token] >= min_p * shares.max() * (1 - 1e-4)
    allowed = shares[shares >= min_p * shares.max() * (1 - 1e-4)].sort(descending=True).values
    allowed = allowed[: top_k or None]
    assert likelier.sum() <= top_p * allowed.sum() * (1 + 1e-4)
