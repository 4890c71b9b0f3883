from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cache.adapter import Adapter
from cache.block_hash import BlockChain, ExtraKeys, HashScheme, TokenIds
from cache.prefix_cache import PrefixCache
from tests.fakes.runner import FakeRunner
from tests.worker.engine_bench import BLOCK, TABLE, Bench, running
from tests.worker.engine_load import Load, answers_alone, answers_in_a_crowd, check_engine, check_equal, poison
from worker.batch import SamplingParams, SequenceSlice, SliceResult, StepBatch
from worker.engine import EngineStoppedError
from worker.engine_core import CacheInUseError, EngineCore, choice_seed, make_running
from worker.request import Failure, Request
from worker.scheduler import Limits, QueueFullError

PROMPT = [100 + index for index in range(40)]


async def test_an_answer_comes_token_by_token_and_ends_by_length() -> None:
    with running(Bench()) as bench:
        answer = await bench.answer(PROMPT, 7, ignore_eos=True)
    assert len(answer.token_ids()) == 7
    assert all(len(piece.token_ids) == 1 for piece in answer.pieces)
    assert [piece.finish_reason for piece in answer.pieces] == [""] * 6 + ["length"]
    assert answer.text() == "".join(f"{token_id}." for token_id in answer.token_ids() if token_id != 2)
    assert answer.ending is not None
    assert answer.ending.num_output_tokens == 7
    bench.check_all_is_free()


async def test_the_end_token_ends_an_answer_and_has_no_text() -> None:
    with running(Bench()) as bench:
        answer = await bench.answer(PROMPT, 400)
    assert answer.token_ids()[-1] == 2
    assert 2 not in answer.token_ids()[:-1]
    assert answer.last().finish_reason == "stop"
    assert answer.last().stop_reason == ""
    assert not answer.text().endswith("2.")


async def test_ignore_eos_goes_on_and_min_tokens_puts_it_off() -> None:
    with running(Bench()) as bench:
        natural = await bench.answer(PROMPT, 400)
        more = len(natural.token_ids()) + 5
        assert len((await bench.answer(PROMPT, more, ignore_eos=True)).token_ids()) == more
        late = await bench.answer(PROMPT, 400, min_tokens=more)
        assert len(late.token_ids()) > more
        assert 2 not in late.token_ids()[:more]


async def test_a_stop_token_and_a_stop_string_end_an_answer_and_say_which() -> None:
    with running(Bench()) as bench:
        token_ids = (await bench.answer(PROMPT, 12, ignore_eos=True)).token_ids()
        by_token = await bench.answer(PROMPT, 12, ignore_eos=True, stop_token_ids=frozenset({token_ids[4]}))
        by_text = await bench.answer(PROMPT, 12, ignore_eos=True, stop_strings=(f"{token_ids[4]}.",))
    assert by_token.token_ids() == token_ids[:5]
    assert (by_token.last().finish_reason, by_token.last().stop_reason) == ("stop", str(token_ids[4]))
    assert by_text.token_ids() == token_ids[:5]
    assert (by_text.last().finish_reason, by_text.last().stop_reason) == ("stop", f"{token_ids[4]}.")
    assert by_text.text() == by_token.text() == "".join(f"{token_id}." for token_id in token_ids[:4] if token_id != 2)
    bench.check_all_is_free()


async def test_the_second_request_with_a_prefix_hits_and_the_answer_is_the_same() -> None:
    with running(Bench()) as bench:
        cold = await bench.answer(PROMPT)
        warm = await bench.answer(PROMPT)
    assert cold.token_ids() == warm.token_ids()
    assert cold.ending is not None
    assert warm.ending is not None
    assert (cold.ending.num_cached_tokens, warm.ending.num_cached_tokens) == (0, 32)
    admitted = [one.num_cached_tokens for report in bench.reports for one in report.admitted]
    assert admitted == [0, 32]


async def test_the_ending_names_the_blocks_that_output_tokens_completed() -> None:
    with running(Bench()) as bench:
        answer = await bench.answer(PROMPT, 30, ignore_eos=True)
        ids = PROMPT + answer.token_ids()[:-1]  # the last token is never computed
        assert answer.ending is not None
        assert answer.ending.output_keys == bench.cache.scheme.keys(ids)[len(PROMPT) // BLOCK :]
        assert answer.ending.last_event_seq == bench.cache.last_seq
        assert set(answer.ending.output_keys) <= {key for _, key in bench.resident}


async def test_choices_share_the_prompt_and_draw_apart() -> None:
    with running(Bench()) as bench:
        answer = await bench.answer(PROMPT, 6, num_choices=3, ignore_eos=True)
        alone = await bench.answer(PROMPT, 6, ignore_eos=True)
    assert answer.token_ids(0) == alone.token_ids()
    assert len({tuple(answer.token_ids(index)) for index in range(3)}) == 3
    assert [answer.last(index).finish_reason for index in range(3)] == ["length"] * 3
    assert answer.ending is not None
    assert answer.ending.num_output_tokens == 18
    assert answer.ending.num_cached_tokens == 0
    assert isinstance(bench.runner, FakeRunner)
    assert sum(size for batch in bench.runner.batches for name, _, size in batch if name.startswith("r#1.1")) < 20
    bench.check_all_is_free()


def test_the_first_choice_keeps_the_seed_and_the_others_get_their_own() -> None:
    seeds = [choice_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(16)]
    assert seeds[0] == 0
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_an_answer_goes_on_elsewhere_as_if_it_had_never_been_cut() -> None:
    with running(Bench()) as bench:
        whole = await bench.answer(PROMPT, 20, ignore_eos=True, stop_strings=("never",))
    for num_prior in (1, 7, 19):
        prior = whole.token_ids()[:num_prior]
        with running(Bench()) as other:
            rest = await other.answer(
                PROMPT + prior,
                20,
                ignore_eos=True,
                stop_strings=("never",),
                num_prior_output_tokens=num_prior,
            )
        assert prior + rest.token_ids() == whole.token_ids()
        assert rest.ending is not None
        assert rest.ending.num_output_tokens == 20
        assert whole.text().endswith(rest.text())


async def test_logprobs_and_prompt_logprobs_come_once_even_over_chunks_and_a_warm_cache() -> None:
    with running(Bench(budget=16)) as bench:
        await bench.answer(PROMPT)
        answer = await bench.answer(
            PROMPT, 3, sampling=SamplingParams(seed=5, num_logprobs=2), num_prompt_logprobs=1, ignore_eos=True
        )
    assert [one.token_id for one in answer.pieces[0].prompt_logprobs] == PROMPT[1:]
    assert all(not piece.prompt_logprobs for piece in answer.pieces[1:])
    assert [[one.token_id for one in piece.logprobs] for piece in answer.pieces] == [
        [token_id] for token_id in answer.token_ids()
    ]
    assert answer.ending is not None
    assert answer.ending.num_cached_tokens == 0


async def test_cancelling_frees_everything_within_a_step_and_nothing_more_is_heard() -> None:
    with running(Bench(FakeRunner(65, BLOCK, step_s=0.01))) as bench:
        answer = bench.submit(PROMPT, 400, ignore_eos=True)
        other = bench.submit([7, 8, 9], 5, ignore_eos=True)
        await answer.begun.wait()
        bench.engine.cancel(answer.number)
        assert isinstance(bench.runner, FakeRunner)
        steps = len(bench.runner.batches)
        await other.ended.wait()
        named = [name for batch in bench.runner.batches[steps + 1 :] for name, _, _ in batch]
        assert f"r#{answer.number}.0" not in named
        bench.engine.cancel(answer.number)
        bench.engine.cancel(12345)
    assert answer.ending is None
    bench.check_all_is_free()


async def test_a_deadline_ends_a_request_that_runs_and_one_that_waits() -> None:
    with running(Bench(FakeRunner(65, BLOCK, step_s=0.005), max_num_seqs=1)) as bench:
        deadline_s = time.monotonic() + 0.1
        runs = bench.submit(PROMPT, 400, ignore_eos=True, deadline_s=deadline_s, num_choices=1)
        waits = bench.submit(PROMPT, 5, deadline_s=deadline_s, num_choices=2)
        await runs.ended.wait()
        await waits.ended.wait()
    for answer in (runs, waits):
        assert answer.ending is not None
        assert answer.ending.failure is Failure.DEADLINE
    assert runs.ending is not None
    assert runs.ending.num_cached_tokens == 0
    assert waits.ending is not None
    assert waits.ending.num_cached_tokens is None
    bench.check_all_is_free()


async def test_a_full_queue_refuses_at_once() -> None:
    with running(Bench(FakeRunner(65, BLOCK, step_s=0.01), max_num_seqs=1, max_queue=2)) as bench:
        first = bench.submit(PROMPT, 50, ignore_eos=True)
        await first.begun.wait()
        kept = [bench.submit(PROMPT, 1) for _ in range(2)]
        with pytest.raises(QueueFullError):
            bench.submit(PROMPT, 1)
        bench.engine.cancel(first.number)
        for answer in kept:
            await answer.ended.wait()


class CountingScheme(HashScheme):
    """Counts the tokens that it is asked to hash."""

    num_tokens = 0

    def chain(self, token_ids: TokenIds, extra: Sequence[ExtraKeys | None] | None = None) -> BlockChain:
        self.num_tokens += len(token_ids)
        return super().chain(token_ids, extra)


async def test_a_prompt_is_hashed_once_for_all_its_choices() -> None:
    scheme = CountingScheme(block_size=BLOCK)
    with running(Bench(scheme=scheme)) as bench:
        await bench.answer(PROMPT, num_choices=8)
    assert scheme.num_tokens == len(PROMPT)


def poisoned(how: str, step_s: float = 0.0) -> FakeRunner:
    def judge(one: SequenceSlice) -> str | None:
        return f"{how}: NaN" if 666 in one.prompt_token_ids else None

    return FakeRunner(65, BLOCK, poison=judge, step_s=step_s)


@pytest.mark.parametrize("how", ["error", "raise"])
async def test_a_poisoned_request_fails_alone(how: str) -> None:
    with running(Bench(poisoned(how))) as bench:
        sound = bench.submit(PROMPT, 20, ignore_eos=True)
        bad = bench.submit([*PROMPT, 666], 20, num_choices=2)
        await bad.ended.wait()
        await sound.ended.wait()
        again = await bench.answer(PROMPT, 20, ignore_eos=True)
    assert bad.ending is not None
    assert bad.ending.failure is Failure.POISONED
    assert "NaN" in bad.ending.detail
    assert sound.token_ids() == again.token_ids()
    assert not bench.deaths
    bench.check_all_is_free()


async def test_an_engine_on_which_nothing_works_dies_loudly_and_everyone_hears_of_it() -> None:
    runner = FakeRunner(65, BLOCK, step_s=0.005)
    with running(Bench(runner)) as bench:
        runs = bench.submit(PROMPT, 400, ignore_eos=True)
        await runs.begun.wait()
        runner.dead = True
        await runs.ended.wait()
        while not bench.deaths:  # told just after its requests were
            await asyncio.sleep(0.01)
        with pytest.raises(EngineStoppedError):
            bench.submit(PROMPT)
    assert runs.ending is not None
    assert runs.ending.failure is Failure.STOPPED
    assert "the device is gone" in str(bench.deaths[0])


async def test_each_choice_is_counted_once_as_it_ends_with_its_tokens_and_steps() -> None:
    async def outcomes(bench: Bench, wanted: int) -> Counter[str]:
        while (seen := Counter(name for report in bench.reports for name in report.outcomes)).total() < wanted:
            await asyncio.sleep(0.001)
        return seen

    with running(Bench(poisoned("error", step_s=0.002))) as bench:
        await bench.answer(PROMPT, 6, ignore_eos=True, num_choices=2)
        await bench.answer([7, 8], 5, stop_token_ids=frozenset(range(3, 1000)), synthetic=True)
        await bench.answer([*PROMPT, 666], 5)
        await bench.answer(PROMPT, 6, stop_token_ids=frozenset(range(1000)))
        runs = bench.submit(PROMPT, 400, ignore_eos=True, deadline_s=time.monotonic() + 0.02)
        await runs.ended.wait()
        gone = bench.submit(PROMPT, 400, ignore_eos=True)
        await gone.begun.wait()
        bench.engine.cancel(gone.number)
        ended = {"length": 2, "poisoned": 1, "stop": 1, "deadline": 1, "cancelled": 1}
        assert await outcomes(bench, 6) == ended
        before = sum(report.num_output_tokens for report in bench.reports)
        last = bench.submit(PROMPT, 400, ignore_eos=True)
        await last.begun.wait()
    assert await outcomes(bench, 7) == ended | {"stopped": 1}
    assert before >= 2 * 6 + 1 + 1 + 1
    for kind in ("prefill_steps_s", "decode_steps_s"):
        steps_s = [seconds for report in bench.reports for seconds in getattr(report, kind)]
        assert steps_s
        assert min(steps_s) >= 0


class Doomed(FakeRunner):
    """Its first step waits for ``gate`` and is its last."""

    gate = threading.Event()

    def execute(self, batch: StepBatch) -> list[SliceResult]:
        self.gate.wait()
        raise RuntimeError("the device is gone")


class Torn(PrefixCache):
    """No block can be freed."""

    def free(self, request_id: Hashable, now: float = 0.0, recompute: bool = False) -> None:
        raise KeyError(request_id)


async def test_a_death_is_told_even_where_what_it_left_behind_breaks_what_else_was_asked() -> None:
    runner = Doomed(65, BLOCK)
    with running(Bench(runner, make_cache=Torn)) as bench:
        cancelled, waits = bench.submit(PROMPT), bench.submit(PROMPT)
        while not bench.engine.step_age_s():
            await asyncio.sleep(0.01)
        bench.engine.cancel(cancelled.number)
        late = bench.submit(PROMPT)
        runner.gate.set()
        for answer in (waits, late):
            await asyncio.wait_for(answer.ended.wait(), 60)
        while not bench.deaths:
            await asyncio.sleep(0.01)
    assert [one.ending.failure for one in (waits, late) if one.ending is not None] == [Failure.STOPPED] * 2
    assert "the device is gone" in str(bench.deaths[0])


async def test_whoever_asks_about_the_cache_and_leaves_harms_nobody() -> None:
    runner = FakeRunner(65, BLOCK)
    with running(Bench(runner)) as bench:
        runner.hangs.set()
        answer = bench.submit(PROMPT)
        while not bench.engine.step_age_s():
            await asyncio.sleep(0.01)
        assert bench.engine.explain_cache(array("i", PROMPT), None, None).cancel()
        assert bench.engine.reset_cache().cancel()
        runner.hangs.clear()
        await answer.ended.wait()
        assert (await bench.answer(PROMPT)).ending.num_cached_tokens == 32  # type: ignore[union-attr]
    assert not bench.deaths


async def test_stopping_ends_what_runs_and_takes_nothing_more() -> None:
    bench = Bench(FakeRunner(65, BLOCK, step_s=0.005))
    with running(bench):
        runs = bench.submit(PROMPT, 400, ignore_eos=True)
        await runs.begun.wait()
        await asyncio.to_thread(bench.engine.stop)
    await runs.ended.wait()
    assert runs.ending is not None
    assert runs.ending.failure is Failure.STOPPED
    with pytest.raises(EngineStoppedError):
        bench.submit(PROMPT)


async def test_resetting_the_cache_waits_for_nobody_and_says_how_many_blocks_went() -> None:
    with running(Bench(FakeRunner(65, BLOCK, step_s=0.01))) as bench:
        await bench.answer(PROMPT)
        assert await asyncio.wrap_future(bench.engine.reset_cache()) == 2
        assert (await bench.answer(PROMPT)).ending.num_cached_tokens == 0  # type: ignore[union-attr]
        runs = bench.submit(PROMPT, 400, ignore_eos=True)
        await runs.begun.wait()
        with pytest.raises(CacheInUseError):
            await asyncio.wrap_future(bench.engine.reset_cache())


async def test_an_idle_engine_takes_no_steps_and_no_time() -> None:
    with running(Bench()) as bench:
        await bench.answer(PROMPT)
        assert isinstance(bench.runner, FakeRunner)
        steps, cpu_s = len(bench.runner.batches), time.process_time()
        await asyncio.sleep(0.3)
        assert len(bench.runner.batches) == steps
        assert time.process_time() - cpu_s < 0.15
        assert bench.engine.snapshot().running == 0


async def test_the_snapshot_tells_the_load() -> None:
    with running(Bench(FakeRunner(65, BLOCK, step_s=0.02), max_num_seqs=1)) as bench:
        first = bench.submit(PROMPT, 400, ignore_eos=True)
        bench.submit(PROMPT, 4)
        bench.submit([5] * 30, 4)
        await first.begun.wait()
        while bench.engine.snapshot().waiting != 2 or bench.engine.snapshot().running != 1:
            await asyncio.sleep(0.02)
        view = bench.engine.snapshot()
        assert view.waiting_tokens == 40 - 32 + 30
        assert view.prefill_tokens_per_s > 0
        assert view.num_blocks == 64
        assert view.num_cached_blocks >= 2  # of the prompt; the answer may have filled another by now


def test_the_snapshot_tells_of_every_event_that_was_handed_over_since_the_next_step_may_hang() -> None:
    cache = PrefixCache(65, HashScheme(block_size=BLOCK))
    core = EngineCore(
        runner=FakeRunner(65, BLOCK), cache=cache, limits=Limits(8, 64, 1000), table=TABLE, hung_after_s=60
    )
    request = Request(id="r", token_ids=array("i", PROMPT), max_tokens=100, ignore_eos=True, sampling=SamplingParams())
    core.enter(make_running(1, request, lambda item: None, cache.scheme, frozenset({2}), 0.0))
    num_batches = 0
    while core.has_work:
        core.step(0.0)  # the clock stands: no view is due again before the request has ended
        report = core.take_report(0.0)
        num_batches += report is not None and report.events is not None
        assert core.snapshot.last_event_seq == cache.last_seq
        assert core.snapshot.num_cached_blocks == cache.num_cached_blocks
    assert num_batches > 3


@pytest.mark.parametrize(("token_reuse_min", "num_host_blocks"), [(None, 0), (1, 0), (None, 4), (1, 30)])
async def test_a_crowd_of_random_requests_gets_the_answers_of_requests_alone(
    token_reuse_min: int | None, num_host_blocks: int
) -> None:
    adapters = [Adapter(name, name * 64) for name in "ab"]
    load = Load(11, 1000, num_asks=300, num_wishes=300, max_prompt=90, max_output=24, adapters=adapters)
    runner = FakeRunner(13, BLOCK, poison=poison(load), num_host_blocks=num_host_blocks)
    cache: dict[str, Any] = {"token_reuse_min": token_reuse_min, "num_host_blocks": num_host_blocks}
    crowded = Bench(runner, num_blocks=12, budget=40, **cache)
    with running(crowded) as bench, running(Bench(FakeRunner(65, BLOCK, poison=poison(load)), caching=False)) as other:
        for adapter in adapters:
            for engine in (bench.engine, other.engine):
                await asyncio.wrap_future(engine.add_adapter(str(adapter), None, 2))
        crowd = await answers_in_a_crowd(bench, load, 20)
        check_equal(load, crowd, await answers_alone(other, load))
    check_engine(bench)


def test_importing_the_engine_needs_neither_ray_nor_redis_nor_gguf() -> None:
    blocked = ["ray", "redis", "cbor2", "gguf", "grpc", "prometheus_client"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "import worker.engine, worker.model_runner, worker.loading.huggingface, worker.plan, cache.prefix_cache\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, env={"PYTHONPATH": f"{root}:{root}/proto"})
