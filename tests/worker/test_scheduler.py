"""The scheduler alone, stepped by hand over the fake model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_hash import HashScheme
from cache.prefix_cache import PrefixCache
from tests.fakes.runner import FakeRunner
from worker.batch import SamplingParams, StepBatch
from worker.scheduler import MAX_PRIORITY, PRIORITY_S, Choice, ChoiceState, Limits, QueueFullError, Scheduler

BLOCK = 4


@dataclass
class Bench:
    """A scheduler with its cache and model, and the clock in hand."""

    num_blocks: int = 64
    max_num_seqs: int = 4
    budget: int = 16
    max_queue: int = 100
    caching: bool = True
    token_reuse_min: int | None = None
    num_host_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    now: float = 0.0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheme = HashScheme(block_size=BLOCK)
        self.cache = PrefixCache(
            self.num_blocks + 1,
            self.scheme,
            self.caching,
            token_reuse_min=self.token_reuse_min,
            policy="lru",
            num_host_blocks=self.num_host_blocks,
        )
        self.scheduler = Scheduler(self.cache, Limits(self.max_num_seqs, self.budget, self.max_queue))
        self.runner = FakeRunner(self.num_blocks + 1, BLOCK, vocab_size=50, num_host_blocks=self.num_host_blocks)

    def add(self, name: str, tokens: list[int], num_output: int, *, priority: int = 0, **more: object) -> Choice:
        choice = Choice(
            id=name,
            chain=self.scheme.chain(tokens),
            prompt_token_ids=tokens,
            output_token_ids=[],
            arrival_s=self.now,
            priority=priority,
            **{"sampling": SamplingParams(seed=7), **more},  # type: ignore[arg-type]
        )
        self.wanted[name] = num_output
        self.choices[name] = choice
        self.scheduler.check_room(1)
        self.scheduler.add(choice, self.prefill_tokens_per_s)
        return choice

    def step(self) -> list[tuple[str, int, int]]:
        """One step; (request, start, tokens) of each slice."""
        self.now += 1
        step = self.scheduler.schedule(self.now)
        assert sum(len(piece.token_ids) for piece in step.slices) <= self.budget
        self.runner.copy(self.cache.take_copies())
        results = self.runner.execute(StepBatch(slices=step.slices))
        for choice, piece, result in zip(step.choices, step.slices, results, strict=True):
            self.scheduler.computed(choice, piece)
            if result.token_id is not None:
                self.scheduler.draw(choice, result.token_id)
                if len(choice.output_token_ids) == self.wanted[choice.id]:
                    self.end(choice)
        self.scheduler.check_invariants()
        self.cache.check_invariants()
        return self.runner.batches[-1]

    def end(self, choice: Choice) -> None:
        self.scheduler.finish(choice, self.now)
        self.outputs[choice.id] = choice.output_token_ids

    def run(self) -> dict[str, list[int]]:
        for _ in range(10_000):
            if not self.scheduler.has_work:
                return self.outputs
            self.step()
        raise AssertionError("it never ends")


def alone(tokens: list[int], num_output: int) -> list[int]:
    bench = Bench(caching=False)
    bench.add("a", tokens, num_output)
    return bench.run()["a"]


def test_a_long_prompt_is_read_in_chunks_of_the_budget() -> None:
    bench = Bench(budget=16)
    bench.add("a", list(range(40)), 1)
    assert [bench.step(), bench.step(), bench.step()] == [[("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)]]
    assert not bench.scheduler.has_work


def test_rows_that_decode_come_before_chunks_and_chunks_take_the_rest() -> None:
    bench = Bench(budget=16)
    bench.add("a", list(range(8)), 3)
    bench.step()
    bench.add("b", list(range(100, 130)), 1)
    assert bench.step() == [("a", 8, 1), ("b", 0, 15)]


def test_the_last_token_of_an_answer_takes_no_slot() -> None:
    bench = Bench(num_blocks=2)
    bench.add("a", [1, 2, 3, 4], 5)  # 4 + 5 tokens, of which 8 are computed: two blocks
    assert len(bench.run()["a"]) == 5
    assert bench.scheduler.num_preemptions == 0


def test_first_come_first_served_and_a_lower_priority_number_goes_before() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("first", [1, 2], 1)
    bench.add("second", [3, 4], 1)
    bench.add("urgent", [5, 6], 1, priority=-1)
    assert [bench.step()[0][0] for _ in range(3)] == ["urgent", "first", "second"]


def test_a_prompt_found_in_the_cache_goes_before_the_rest_of_a_long_cold_one() -> None:
    bench = Bench(budget=16, prefill_tokens_per_s=16)
    bench.add("before", list(range(12)), 1)
    bench.run()
    bench.add("cold", list(range(100, 164)), 1)
    assert bench.step() == [("cold", 0, 16)]
    bench.add("warm", [*range(12), 90, 91], 1)
    assert bench.step() == [("warm", 12, 2), ("cold", 16, 14)]


def test_a_long_prompt_lets_others_pass_for_as_long_as_it_takes_itself_and_no_longer() -> None:
    bench = Bench(budget=16, prefill_tokens_per_s=16)
    bench.add("long", list(range(100, 148)), 1)
    computed = []
    for number in range(6):  # each of them is enough for a step
        bench.add(f"short {number}", [200 + 16 * number + token for token in range(16)], 1)
        computed += [name for name, _, _ in bench.step()]
    assert computed == ["short 0", "short 1", "long", "long", "long", "short 2"]


def test_where_the_speed_is_not_known_a_begun_prompt_goes_on_before_one_that_came_later() -> None:
    bench = Bench(budget=16)
    bench.add("long", list(range(100, 140)), 1)
    bench.step()
    bench.add("short", [1, 2], 1)
    assert bench.step() == [("long", 16, 16)]
    assert bench.step() == [("long", 32, 8), ("short", 0, 2)]


def test_a_small_prompt_before_a_begun_one_takes_no_blocks_that_an_earlier_one_waits_for() -> None:
    bench = Bench(num_blocks=12, budget=8, prefill_tokens_per_s=8)
    bench.add("begun", list(range(100, 140)), 1)  # 10 of 12 blocks
    bench.step()
    bench.add("large", list(range(50, 62)), 1)  # 3 blocks
    bench.now += 0.7
    bench.add("small", [1, 2, 3, 4, 5, 6, 7], 1)  # 2 blocks, and due a moment later
    assert bench.step() == [("begun", 8, 8)]
    ended = list(bench.run())
    assert ended.index("large") < ended.index("small")


def test_priority_is_worth_a_bounded_wait_so_nobody_starves() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("patient", [1, 2], 1, priority=1)
    bench.now = PRIORITY_S + 1
    bench.add("late", [3, 4], 1)
    assert bench.step()[0][0] == "patient"


@pytest.mark.parametrize("priority", [11, 2**31 - 1])
def test_whoever_asks_for_more_than_priorities_go_gets_the_last_of_them(priority: int) -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("patient", [1, 2], 1, priority=priority)
    bench.add("urgent", [3, 4], 1, priority=-priority)
    bench.now = 1
    bench.add("later", [5, 6], 1, priority=-MAX_PRIORITY)
    bench.now = MAX_PRIORITY * PRIORITY_S + 1
    bench.add("last", [7, 8], 1)
    assert [bench.step()[0][0] for _ in range(4)] == ["urgent", "later", "patient", "last"]


def test_what_penalties_look_at_grows_with_the_answer_and_outlives_a_preemption() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2)
    bench.add("old", [1, 2, 3, 4, 5, 6, 7, 8], 9)
    bench.now += 1
    prompt = [11, 12, 13, 14, 15, 16, 17, 11]
    young = bench.add("young", prompt, 9, sampling=SamplingParams(seed=1, repetition_penalty=1.1))
    bench.run()
    assert young.num_preemptions > 0
    assert young.seen is not None
    counts = Counter(bench.outputs["young"])
    wanted = {token_id: counts[token_id] for token_id in {*prompt, *counts}}
    assert dict(zip(young.seen.ids.tolist(), young.seen.counts.tolist(), strict=True)) == wanted


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    bench = Bench(budget=64, max_num_seqs=8)
    prefix = list(range(16))
    for index in range(4):
        bench.add(f"r{index}", [*prefix, 100 + index, 7], 2)
    assert bench.step() == [("r0", 0, 18)]
    assert bench.step() == [("r0", 18, 1), ("r1", 16, 2), ("r2", 16, 2), ("r3", 16, 2)]
    assert [bench.choices[f"r{index}"].num_cached for index in range(4)] == [0, 16, 16, 16]


@pytest.mark.parametrize("caching", [True, False])
def test_what_several_that_wait_begin_with_counts_once_as_it_is_computed_once(caching: bool) -> None:
    bench = Bench(budget=8, caching=caching)
    front = list(range(20))
    for name in "abcd":
        bench.add(name, [*front, ord(name)], 2)
    bench.add("e", [*front[:8], 7, 7, 7], 2)
    assert bench.scheduler.waiting_tokens() == (21 + 3 * 1 + 3 if caching else 4 * 21 + 11)
    bench.add("f", [*front, 7], 2, num_prompt_logprobs=0)  # each of its positions must be computed
    assert bench.scheduler.waiting_tokens() == (27 + 21 if caching else 95 + 21)
    bench.step()  # 8 tokens of the first one
    assert bench.scheduler.waiting_tokens() == (27 + 21 - 8 if caching else 116 - 8)


def test_tokens_that_wait_are_those_that_steps_then_compute() -> None:
    rng = random.Random(4)
    for _ in range(30):
        bench = Bench(num_blocks=2000, max_num_seqs=50, budget=10_000)
        prompts: list[list[int]] = [[rng.randrange(3) for _ in range(8)]]
        for number in range(20):
            front = rng.choice(prompts)
            prompts.append(
                front[: rng.randrange(1, len(front) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(40))]
            )
            bench.add(str(number), prompts[-1], 1)
            if number == 5:
                bench.step()
        expected, computed = bench.scheduler.waiting_tokens(), 0
        while bench.scheduler.has_work:
            computed += sum(tokens for _, _, tokens in bench.step())
        assert computed == expected


def test_whoever_waits_for_a_prefix_lets_others_pass() -> None:
    bench = Bench(budget=16)
    bench.add("a", list(range(24)), 1)
    bench.add("waits", [*range(24), 9], 1)
    bench.add("other", [40, 41], 1)
    assert bench.step() == [("a", 0, 16)]
    assert bench.step() == [("a", 16, 8), ("other", 0, 2)]
    assert bench.step() == [("waits", 24, 1)]


def test_without_caching_nobody_waits() -> None:
    bench = Bench(budget=64, caching=False)
    bench.add("a", list(range(16)), 1)
    bench.add("b", list(range(16)), 1)
    assert bench.step() == [("a", 0, 16), ("b", 0, 16)]


def test_when_blocks_run_out_the_youngest_is_preempted_and_both_answers_stay_right() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2)
    old, young = [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]
    bench.add("old", old, 9)
    bench.now += 1
    bench.add("young", young, 9)
    outputs = bench.run()
    assert bench.choices["young"].num_preemptions > 0
    assert bench.choices["old"].num_preemptions == 0
    assert outputs == {"old": alone(old, 9), "young": alone(young, 9)}


def test_recompute_after_a_preemption_is_no_hit() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2)
    bench.add("old", [1, 2, 3, 4, 5, 6, 7, 8], 9)
    bench.add("young", [11, 12, 13, 14, 15, 16, 17, 18], 9)
    bench.run()
    assert bench.choices["young"].num_preemptions > 0
    assert bench.choices["young"].num_cached == 0
    assert bench.cache.stats.num_hit_tokens == 0


def test_a_prompt_that_does_not_fit_yet_holds_back_those_behind_it() -> None:
    bench = Bench(num_blocks=6, budget=32)
    bench.add("a", list(range(16)), 4)
    bench.step()
    bench.add("large", list(range(50, 70)), 1)
    bench.add("small", [90], 1)
    assert bench.step() == [("a", 16, 1)]
    ended = list(bench.run())
    assert ended.index("large") < ended.index("small")


def test_what_the_next_in_line_will_hit_is_not_evicted_while_it_waits() -> None:
    bench = Bench(num_blocks=8, budget=32)
    for name, front in (("wanted", list(range(8))), ("idle", list(range(20, 28)))):
        bench.add(name, [*front, 49], 1)
        bench.run()
    bench.add("runs", [30, 31, 32, 33], 21)  # grows to 6 blocks: two cached ones must go for it
    bench.step()
    bench.add("waits", [*range(8), *range(34, 49), *range(34, 43)], 1)  # 8 blocks, two of them cached and least recent
    bench.run()
    assert bench.choices["waits"].num_cached == 8
    assert bench.cache.match(bench.scheme.chain([*range(20, 28), 49])) == 0


def test_the_queue_is_bounded() -> None:
    bench = Bench(max_queue=2)
    bench.add("a", [1], 1)
    bench.add("b", [2], 1)
    with pytest.raises(QueueFullError, match="2 of 2"):
        bench.add("c", [3], 1)


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_a_choice_can_end_in_any_state_and_ending_twice_is_ending_once(steps_before: int) -> None:
    bench = Bench(budget=4)
    choice = bench.add("a", list(range(7)), 5)
    for _ in range(steps_before):
        bench.step()
    bench.end(choice)
    bench.end(choice)
    assert choice.state is ChoiceState.ENDED
    assert bench.cache.num_used_blocks == 0
    assert not bench.scheduler.has_work


def test_a_preempted_choice_can_be_cancelled() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2)
    bench.add("old", [1, 2, 3, 4, 5, 6, 7, 8], 9)
    young = bench.add("young", [11, 12, 13, 14, 15, 16, 17, 18], 9)
    while not young.num_preemptions:
        bench.step()
    bench.end(young)
    bench.run()
    assert bench.cache.num_used_blocks == 0


def test_deadlines_are_reported_once_for_whoever_waits_or_runs() -> None:
    bench = Bench(max_num_seqs=1)
    running = bench.add("running", [1, 2], 50, deadline_s=5.0)
    bench.step()
    waiting = bench.add("waiting", [3, 4], 1, deadline_s=4.0)
    assert bench.scheduler.expired(3.9) == []
    assert bench.scheduler.expired(4.0) == [waiting]
    bench.end(waiting)
    assert bench.scheduler.expired(6.0) == [running]
    assert bench.scheduler.expired(7.0) == []


def test_prompt_logprobs_take_no_hit_since_every_position_must_be_computed() -> None:
    bench = Bench(budget=64)
    bench.add("a", list(range(16)), 1)
    bench.step()
    bench.add("b", list(range(16)), 1, num_prompt_logprobs=0)
    assert bench.step() == [("b", 0, 16)]


def test_end_tokens_are_forbidden_until_min_tokens_are_there() -> None:
    bench = Bench()
    choice = bench.add("a", [1, 2, 3], 4, min_tokens=2, end_token_ids=(2, 9))
    forbidden = []
    for _ in range(3):
        step = bench.scheduler.schedule(0)
        forbidden.append(tuple(step.slices[0].forbidden_token_ids))
        bench.scheduler.computed(choice, step.slices[0])
        bench.scheduler.draw(choice, 5)
    assert forbidden == [(2, 9), (2, 9), ()]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(9, 40),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
    caching=st.booleans(),
    token_reuse_min=st.sampled_from([None, 1, 2]),
    num_host_blocks=st.sampled_from([0, 3, 20]),
    prefill_tokens_per_s=st.sampled_from([0.0, 1.0, 10.0]),
)
def test_whatever_comes_everything_ends_with_the_answer_of_a_run_alone(
    seed: int,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
    token_reuse_min: int | None,
    num_host_blocks: int,
    prefill_tokens_per_s: float,
) -> None:
    rng = random.Random(seed)
    bench = Bench(
        num_blocks,
        max_num_seqs,
        budget,
        caching=caching,
        token_reuse_min=token_reuse_min,
        num_host_blocks=num_host_blocks,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    capacity = num_blocks * BLOCK
    trunks = [[rng.randrange(50) for _ in range(rng.randint(1, 20))] for _ in range(3)]
    prompts: dict[str, tuple[list[int], int]] = {}
    cancelled = set()
    for index in range(rng.randint(1, 12)):
        trunk = rng.choice(trunks)
        tokens = trunk[: rng.randint(1, len(trunk))] + [rng.randrange(50) for _ in range(rng.randint(0, 6))]
        num_output = rng.randint(1, min(12, capacity - len(tokens)))
        name = f"r{index}"
        prompts[name] = (tokens, num_output)
        bench.add(name, tokens, num_output, priority=rng.randint(-1, 1))
        for _ in range(rng.randint(0, 4)):
            if bench.scheduler.has_work:
                bench.step()
        if rng.random() < 0.2:
            victim = rng.choice(list(bench.choices.values()))
            if victim.state is not ChoiceState.ENDED:
                bench.end(victim)
                cancelled.add(victim.id)
    outputs = bench.run()
    assert bench.cache.num_used_blocks == 0
    for name, (tokens, num_output) in prompts.items():
        expected = alone(tokens, num_output)
        assert outputs[name] == (expected[: len(outputs[name])] if name in cancelled else expected)
