from __future__ import annotations

import pytest

from worker.step_times import StepTimes


def run(steps: StepTimes, num_prefill_tokens: int, seconds: float) -> None:
    steps.began(num_prefill_tokens, 0.0)
    steps.ended(seconds)


def hangs_after(steps: StepTimes, num_prefill_tokens: int) -> float:
    """Seconds, to a tenth, after which a step of this kind is taken for hung."""
    steps.began(num_prefill_tokens, 1000.0)
    return next(tenths / 10 for tenths in range(1, 10_000) if steps.hung_s(1000.0 + tenths / 10))


def test_a_step_hangs_after_five_seconds_or_ten_times_what_was_expected() -> None:
    steps = StepTimes()
    run(steps, 1000, 2.0)
    assert steps.prefill_tokens_per_s == 500
    run(steps, 0, 0.05)
    assert hangs_after(steps, 0) == 5.1
    assert hangs_after(steps, 100) == 5.1
    assert hangs_after(steps, 1000) == 20.6  # ten times 2 s, and ten times 50 ms for what decodes beside it
    assert StepTimes(0.5).hung_s(0.0) == 0


def test_the_first_step_of_each_kind_may_take_a_minute_since_kernels_may_be_compiled_in_it() -> None:
    steps = StepTimes()
    assert hangs_after(steps, 30) == 60.1
    assert hangs_after(steps, 0) == 60.1
    run(steps, 30, 40.0)  # it was
    assert hangs_after(steps, 0) == 60.1
    run(steps, 0, 20.0)
    for _ in range(200):
        run(steps, 500, 0.1)
        run(steps, 0, 0.01)
    assert hangs_after(steps, 500) == 5.1


def test_no_chunk_of_a_very_long_prompt_on_a_slow_machine_is_taken_for_hung() -> None:
    """128k tokens in chunks of 2,048: attention makes the last chunks ten times as slow as the first ones."""
    steps = StepTimes()
    for number in range(64):
        seconds = 20.0 * (1 + 9 * number / 63)
        steps.began(2048, 0.0)
        assert not steps.hung_s(seconds)
        steps.ended(seconds)


def test_between_steps_nothing_hangs_and_nothing_has_an_age() -> None:
    steps = StepTimes()
    assert (steps.age_s(100.0), steps.hung_s(100.0), steps.prefill_tokens_per_s) == (0, 0, 0)
    run(steps, 10, 1.0)
    steps.began(0, 5.0)
    assert steps.age_s(7.0) == 2.0
    steps.ended(2.0)
    assert (steps.age_s(100.0), steps.hung_s(100.0)) == (0, 0)
    assert steps.prefill_tokens_per_s == pytest.approx(10)
