"""Random requests for an engine, and the judgement that a crowd of them got what each gets alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cache.adapter import Adapter
from cache.retention import Retention
from tests.worker.engine_bench import Answer, Bench
from worker.batch import SamplingParams, SequenceSlice
from worker.engine_core import CacheInUseError
from worker.request import Failure

NO_TOKEN = 1 << 20  # beyond every vocabulary: a step that is to favour it is raised out of the runner


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a crowd, and what befalls it there."""

    number: int  # of what it asks for, in ``Load.wishes``
    patience_s: float | None  # until its deadline
    cancelled_after_s: float | None


class Load:
    """A crowd of ``num_asks``, each of which asks for one of ``num_wishes`` random requests.

    These share fronts and have every field that a request can have. The last token id is the broken one.
    """

    def __init__(
        self,
        seed: int,
        vocab_size: int,
        *,
        num_asks: int,
        num_wishes: int,
        max_prompt: int = 80,
        max_output: int = 12,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._rng = random.Random(seed)
        self.broken_token_id = vocab_size - 1
        self._max_output = max_output
        self._adapters = adapters
        self._trunks = [self._tokens(self._rng.randint(5, max_prompt)) for _ in range(6)]
        self.wishes = [self._wish() for _ in range(num_wishes)]  # fields of ``worker.request.Request``
        self.asks = [self._ask(number % num_wishes) for number in range(num_asks)]
        self._rng.shuffle(self.asks)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, self.broken_token_id) for _ in range(count)]

    def _ask(self, number: int) -> Ask:
        rng = self._rng
        return Ask(
            number,
            patience_s=rng.choice([0.0, 0.003, 0.03]) if rng.random() < 0.05 else None,
            cancelled_after_s=rng.random() * 0.02 if rng.random() < 0.1 else None,
        )

    def _wish(self) -> dict[str, Any]:
        rng = self._rng
        trunk = rng.choice(self._trunks)
        token_ids = trunk[: rng.randint(1, len(trunk))] + self._tokens(rng.choice([0, 0, 3, 12]))
        max_tokens = rng.randint(1, self._max_output)
        num_choices = rng.choice([1, 1, 1, 1, 2, 3])
        fields: dict[str, Any] = {
            "sampling": self._sampling(),
            "max_tokens": max_tokens,
            "num_choices": num_choices,
            "ignore_eos": rng.random() < 0.5,
            "cache_salt": rng.choice([None, None, None, "salt"]),
            "tenant": rng.choice(["", "a", "b"]),
            "priority": rng.choice([-(2**31), -1, 0, 0, 0, 1, 2**31 - 1]),
            "synthetic": rng.random() < 0.1,
        }
        if rng.random() < 0.3:
            fields["stop_strings"] = (f"{rng.randrange(10)}.", "77", "e ")[: rng.randint(1, 3)]
        if rng.random() < 0.3:
            fields["stop_token_ids"] = frozenset(self._tokens(self.broken_token_id // 20))
        if rng.random() < 0.2:
            fields["min_tokens"] = rng.randint(1, max_tokens)
        if rng.random() < 0.2:
            fields["retention"] = (Retention(rng.randint(1, len(token_ids)), 300.0, rng.randint(0, 3)),)
        if self._adapters and rng.random() < 0.4:
            fields["adapter"] = rng.choice(self._adapters)
        if num_choices == 1 and max_tokens > 1 and rng.random() < 0.15:
            fields["num_prior_output_tokens"] = rng.randint(1, max_tokens - 1)
            token_ids += self._tokens(fields["num_prior_output_tokens"])
        elif rng.random() < 0.1:
            fields["num_prompt_logprobs"] = rng.randint(0, 2)
        fate = rng.random()
        if fate < 0.03:
            token_ids.insert(rng.randrange(len(token_ids)), self.broken_token_id)
        elif fate < 0.05:
            fields["sampling"] = replace(fields["sampling"], logit_bias={NO_TOKEN: 1.0})
        return fields | {"token_ids": token_ids}

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        bias = {token_id: rng.uniform(-5, 5) for token_id in self._tokens(4)} if rng.random() < 0.2 else {}
        return SamplingParams(
            seed=rng.randrange(100),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 0, 5, 200]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2, 0.8]),
            presence_penalty=rng.choice([0.0, 0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4, -0.3]),
            logit_bias=bias,
            num_logprobs=rng.choice([None, None, 0, 3]),
        )


def poison(load: Load) -> Any:
    """For the fake model: it breaks where a real one would, at the token and at the bias."""

    def judge(one: SequenceSlice) -> str | None:
        if load.broken_token_id in one.token_ids:
            return "NaN"
        bias: Mapping[int, float] = {} if one.sampling is None else one.sampling.logit_bias
        return "raise: no such token" if NO_TOKEN in bias else None

    return judge


def said(answer: Answer, index: int) -> tuple[list[Any], ...]:
    """All that one choice got, as lists of which another may be a front."""
    pieces = [piece for piece in answer.pieces if piece.index == index]
    return (
        [token_id for piece in pieces for token_id in piece.token_ids],
        list(answer.text(index)),
        [one for piece in pieces for one in piece.logprobs],
        [one for piece in pieces for one in piece.prompt_logprobs],
        [(piece.finish_reason, piece.stop_reason) for piece in pieces if piece.finish_reason],
    )


async def answers_alone(bench: Bench, load: Load) -> list[Answer]:
    """What each wish gives, one at a time; nothing befalls them."""
    return [await bench.answer(**wish) for wish in load.wishes]


async def answers_in_a_crowd(bench: Bench, load: Load, in_flight: int) -> list[Answer]:
    """Up to ``in_flight`` at once, while others ask about the cache. When it returns the engine holds nothing."""
    meddling = asyncio.create_task(_meddle(bench, load))
    places = asyncio.Semaphore(in_flight)

    async def answer(ask: Ask) -> Answer:
        async with places:
            deadline = {} if ask.patience_s is None else {"deadline_s": time.monotonic() + ask.patience_s}
            one = bench.submit(**load.wishes[ask.number], **deadline)
            if ask.cancelled_after_s is None:
                await one.ended.wait()
            else:
                await asyncio.sleep(ask.cancelled_after_s)
                bench.engine.cancel(one.number)
            return one

    answers = await asyncio.gather(*map(answer, load.asks))
    meddling.cancel()
    while bench.engine.snapshot().num_used_blocks or bench.engine.snapshot().waiting:
        await asyncio.sleep(0.01)
    return answers


async def _meddle(bench: Bench, load: Load) -> None:
    """Ask what an operator may ask, and leave before every second answer."""
    rng, engine = random.Random(len(load.asks)), bench.engine

    def explain(wish: dict[str, Any]) -> Future[Any]:
        return engine.explain_cache(array("i", wish["token_ids"]), wish.get("adapter"), wish["cache_salt"])

    while True:
        asked: list[Callable[[], Future[Any]]] = [
            partial(explain, rng.choice(load.wishes)),
            partial(engine.eviction_of, rng.randrange(1 << 64)),
            engine.cache_snapshot,
            engine.reset_cache,
        ]
        future = rng.choice(asked)()
        if rng.random() < 0.5:
            future.cancel()
        else:
            with contextlib.suppress(CacheInUseError):
                await asyncio.wrap_future(future)
        await asyncio.sleep(rng.random() * 0.02)


def check_equal(load: Load, crowd: Sequence[Answer], alone: Sequence[Answer]) -> None:
    """Every answer of the crowd is what it is alone, as far as it came; and all that can befall one did."""
    ends: Counter[str] = Counter()
    for ask, seen in zip(load.asks, crowd, strict=True):
        wish, wanted = load.wishes[ask.number], alone[ask.number]
        assert wanted.ending is not None
        failure = None if seen.ending is None else seen.ending.failure
        is_cut = failure is Failure.DEADLINE or (seen.ending is None and ask.cancelled_after_s is not None)
        if not is_cut:
            assert failure is wanted.ending.failure, wish
        for index in range(wish["num_choices"]):
            for got, whole in zip(said(seen, index), said(wanted, index), strict=True):
                if wanted.ending.failure is not None:  # how far other choices than the broken one came is chance
                    assert got[: len(whole)] == whole[: len(got)], wish
                elif is_cut:
                    assert got == whole[: len(got)], wish
                else:
                    assert got == whole, wish
            ends.update(reason for reason, _ in said(seen, index)[-1])
        ends["cancelled" if seen.ending is None else "ended" if failure is None else failure.value] += 1
    for end in ("stop", "length", "ended", "cancelled", Failure.DEADLINE.value, Failure.POISONED.value):
        assert ends[end], ends


def check_engine(bench: Bench) -> None:
    """It was crowded enough to try everything, lives, and holds nothing any more."""
    assert sum(report.num_preemptions for report in bench.reports) > 0
    admitted = [one for report in bench.reports for one in report.admitted]
    assert any(one.num_cached_tokens for one in admitted)
    assert any(one.num_host_tokens for one in admitted) == bool(bench.cache.num_host_blocks)
    assert not bench.deaths
    bench.check_all_is_free()
