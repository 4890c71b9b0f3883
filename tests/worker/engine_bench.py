"""An engine over the fake model (or any runner) for tests, and answers gathered whole."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cache.block_hash import HashScheme
from cache.events import Cleared, EventBatch, Removed, Stored, Tier
from cache.prefix_cache import PrefixCache
from tests.fakes.runner import FakeRunner, fake_tokenizer_json
from worker.batch import SamplingParams
from worker.detokenizer import TokenTable
from worker.engine import Engine
from worker.engine_core import Runner
from worker.request import Ending, Piece, Request, StepReport
from worker.scheduler import Limits

TABLE = TokenTable.from_tokenizer_json(fake_tokenizer_json())
BLOCK = 16


@dataclass
class Answer:
    """All that was said about one request."""

    pieces: list[Piece] = field(default_factory=list)
    ending: Ending | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    number: int = 0

    def sink(self, item: Piece | Ending) -> None:
        assert self.ending is None, "something came after the ending"
        if isinstance(item, Ending):
            self.ending = item
            self.ended.set()
        else:
            self.pieces.append(item)
        self.begun.set()

    def token_ids(self, index: int = 0) -> list[int]:
        return [token_id for piece in self.pieces if piece.index == index for token_id in piece.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces if piece.index == index)

    def last(self, index: int = 0) -> Piece:
        return [piece for piece in self.pieces if piece.index == index][-1]


class Bench:
    """Replays the cache's events into ``resident`` as a router would."""

    def __init__(
        self,
        runner: Runner | None = None,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_queue: int = 1000,
        caching: bool = True,
        token_reuse_min: int | None = None,
        num_host_blocks: int = 0,
        scheme: HashScheme | None = None,
        make_cache: type[PrefixCache] = PrefixCache,
        table: TokenTable = TABLE,
    ) -> None:
        self.cache = make_cache(
            num_blocks + 1,
            scheme or HashScheme(block_size=BLOCK),
            caching,
            token_reuse_min=token_reuse_min,
            num_host_blocks=num_host_blocks,
        )
        self.runner = runner or FakeRunner(num_blocks + 1, BLOCK, num_host_blocks=num_host_blocks)
        self.reports: list[StepReport] = []
        self.resident: set[tuple[Tier, int]] = set()
        self.deaths: list[BaseException] = []
        self.engine = Engine(
            runner=self.runner,
            cache=self.cache,
            limits=Limits(max_num_seqs, budget, max_queue),
            table=table,
            eos_token_ids=frozenset({2}),
            on_step=self._on_step,
            on_death=self.deaths.append,
        )

    def _on_step(self, report: StepReport) -> None:
        self.reports.append(report)
        self._apply(report.events)

    def _apply(self, batch: EventBatch | None) -> None:
        for event in batch.events if batch else ():
            if isinstance(event, Stored):
                self.resident.update((event.tier, key) for key in event.keys)
            elif isinstance(event, Removed):
                self.resident.difference_update((event.tier, key) for key in event.keys)
            elif isinstance(event, Cleared):
                self.resident.clear()

    def submit(self, token_ids: list[int], max_tokens: int = 10, **more: Any) -> Answer:
        answer = Answer()
        more.setdefault("sampling", SamplingParams(seed=5))
        request = Request(id="r", token_ids=array("i", token_ids), max_tokens=max_tokens, **more)
        answer.number = self.engine.submit(request, answer.sink)
        return answer

    async def answer(self, token_ids: list[int], max_tokens: int = 10, **more: Any) -> Answer:
        answer = self.submit(token_ids, max_tokens, **more)
        await answer.ended.wait()
        return answer

    def check_all_is_free(self) -> None:
        self.cache.check_invariants()
        assert self.cache.num_used_blocks == 0
        self._apply(self.cache.take_events())
        assert self.resident == {(run.tier, key) for run in self.cache.snapshot().runs for key in run.keys}


@contextmanager
def running(bench: Bench) -> Iterator[Bench]:
    bench.engine.start()
    try:
        yield bench
    finally:
        bench.engine.stop()
