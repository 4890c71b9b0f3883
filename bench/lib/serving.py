"""A load through the engine as a worker runs it: scheduler, prefix cache, runner. For several benchmarks."""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from cache.block_hash import HashScheme
from cache.prefix_cache import BlockCopies, PrefixCache
from worker.batch import SamplingParams, SliceResult, StepBatch
from worker.detokenizer import TokenTable
from worker.engine import Engine
from worker.request import Ending, Piece, Request, StepReport
from worker.scheduler import Limits

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0)


class Runner(Protocol):
    def copy(self, copies: Sequence[BlockCopies]) -> None: ...

    def execute(self, batch: StepBatch) -> list[SliceResult]: ...


@dataclass(slots=True)
class Step:
    """What one step cost the engine's thread, in seconds of its processor time: waiting for others is not in it."""

    rows: int
    tokens: int
    model_s: float
    engine_s: float  # from the end of the step before to the beginning of this one


class Meter:
    """A runner that counts what it is asked to compute; without a model behind it, it draws the same token always."""

    def __init__(self, model: Runner | None) -> None:
        self._model = model
        self.num_tokens = 0
        self.steps: list[Step] = []
        self._ended_s: float | None = None

    def copy(self, copies: Sequence[BlockCopies]) -> None:
        if self._model is not None:
            self._model.copy(copies)

    def execute(self, batch: StepBatch) -> list[SliceResult]:
        self.num_tokens += batch.num_tokens
        begin = time.thread_time()
        if self._model is not None:
            results = self._model.execute(batch)
        else:
            results = [SliceResult(token_id=None if one.sampling is None else 5) for one in batch.slices]
        end = time.thread_time()
        if self._ended_s is not None:
            self.steps.append(Step(len(batch.slices), batch.num_tokens, end - begin, begin - self._ended_s))
        self._ended_s = end
        return results


@dataclass(slots=True)
class Served:
    """What came of a load."""

    seconds: float
    ttfts_s: list[float]
    num_cached: list[int]  # prompt tokens that were not computed again, per request
    prompt_tokens: int
    computed_prompt_tokens: int
    num_preemptions: int
    outputs: list[list[int]]
    steps: list[Step] = field(default_factory=list)

    @property
    def requests_per_s(self) -> float:
        return len(self.ttfts_s) / self.seconds

    @property
    def ttft_s(self) -> float:
        return median(self.ttfts_s)


class Server:
    """One engine over ``model`` with a new, cold cache of ``num_blocks``."""

    def __init__(
        self,
        model: Runner | None,
        table: TokenTable,
        *,
        num_blocks: int,
        max_num_seqs: int = 16,
        step_tokens: int = 512,
        reuse: bool = True,
        token_reuse_min: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._meter = Meter(model)
        self._num_preemptions = 0
        self._engine = Engine(
            runner=self._meter,
            cache=PrefixCache(num_blocks, HashScheme(block_size=BLOCK_SIZE), reuse, token_reuse_min=token_reuse_min),
            limits=Limits(max_num_seqs, step_tokens, 100_000),
            table=table,
            eos_token_ids=frozenset(),
            on_step=self._on_step,
            on_death=self._on_death,
        )
        self._engine.start()

    async def answer(self, prompts: Sequence[Sequence[int]], output: int) -> Served:
        """All ``prompts`` at once; each answer has ``output`` tokens."""
        loop, begin = asyncio.get_running_loop(), self._clock()
        computed_before, preempted_before = self._meter.num_tokens, self._num_preemptions
        self._meter.steps.clear()
        endings: list[asyncio.Future[Ending]] = [loop.create_future() for _ in prompts]
        ttfts: list[float] = [0.0] * len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]

        def listen(number: int) -> None:
            def sink(item: Piece | Ending) -> None:
                if isinstance(item, Ending):
                    endings[number].set_result(item)
                    return
                if not outputs[number]:
                    ttfts[number] = self._clock() - begin
                outputs[number] += item.token_ids

            request = Request(
                id=str(number),
                token_ids=array("i", prompts[number]),
                sampling=GREEDY,
                max_tokens=output,
                ignore_eos=True,
            )
            self._engine.submit(request, sink)

        for number in range(len(prompts)):
            listen(number)
        ended = await asyncio.gather(*endings)
        took = self._clock() - begin
        if failed := [one for one in ended if one.failure]:
            raise SystemExit(f"{len(failed)} requests failed: {failed[0].failure}")
        decoded = sum(one.num_output_tokens - 1 for one in ended)  # the first token is drawn by the prefill
        return Served(
            seconds=took,
            ttfts_s=ttfts,
            num_cached=[one.num_cached_tokens or 0 for one in ended],
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            computed_prompt_tokens=self._meter.num_tokens - computed_before - decoded,
            num_preemptions=self._num_preemptions - preempted_before,
            outputs=outputs,
            steps=list(self._meter.steps),
        )

    def stop(self) -> None:
        self._engine.stop()

    def _on_step(self, report: StepReport) -> None:
        self._num_preemptions += report.num_preemptions

    @staticmethod
    def _on_death(error: BaseException) -> None:
        raise SystemExit(f"the engine died: {error}")


def made_up(length: int, seed: int) -> list[int]:
    """Token ids that no other ``seed`` repeats for long."""
    return [(index * index * 31 + 17 * index + 1009 * seed + index * seed * 7 + 3) % 40_000 for index in range(length)]
