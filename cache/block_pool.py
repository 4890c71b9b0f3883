"""Which blocks are used, and in what order the idle ones are taken: numbers only, nothing of what they hold.

Idle blocks wait in queues, one per class; a lower class is taken first, within a class the front. Freeing and taking
happen in whole tables, so a queue is a row of *runs*: the blocks that one call put there together. A block that is
used again stays in its old run as a dead entry: it is alive only in the run whose stamp it bears. That makes every
operation a few numpy calls per table instead of a pointer dance per block. Dead entries are swept out when they
outnumber the blocks of the pool, so each is paid for once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

BlockIds: TypeAlias = npt.NDArray[np.int32]

_IN_USE = 0


@dataclass(slots=True)
class _Run:
    blocks: BlockIds
    stamp: int
    idle_since_s: float
    position: int = 0


@dataclass(slots=True)
class _Queue:
    runs: deque[_Run]
    num_idle: int = 0
    num_entries: int = 0


class BlockPool:
    """Reference counts and queues of blocks 1 to ``num_blocks - 1``; block 0 is never handed out."""

    __slots__ = ("_classes", "_queues", "_stamps", "_stamps_given", "class_of", "num_blocks", "num_idle", "references")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = np.zeros(num_blocks, dtype=np.int32)
        self.num_idle = 0
        self.class_of = np.zeros(num_blocks, dtype=np.int16)
        """Class of the queue an idle block waits in; where a used one will wait is the owner's business."""
        self._stamps = np.zeros(num_blocks, dtype=np.int64)
        self._stamps_given = 0
        self._queues: dict[int, _Queue] = {}
        self._classes: list[int] = []
        self.queue_back(np.arange(1, num_blocks, dtype=np.int32), 0, float("-inf"))

    def num_idle_in(self, queue_class: int) -> int:
        """Idle blocks of one class."""
        queue = self._queues.get(queue_class)
        return queue.num_idle if queue else 0

    def use(self, blocks: BlockIds) -> None:
        """One more user for each of ``blocks`` (all different); idle ones leave their queue."""
        idle = blocks[self.references[blocks] == 0]
        self.references[blocks] += 1
        self.withdraw(idle)

    def withdraw(self, idle: BlockIds) -> None:
        """Take idle blocks out of their queues, to be used or queued again."""
        if not idle.size:
            return
        self._stamps[idle] = _IN_USE
        self.num_idle -= idle.size
        if len(self._classes) == 1:
            self._queues[self._classes[0]].num_idle -= idle.size
        else:
            for queue_class, count in enumerate(np.bincount(self.class_of[idle]).tolist()):
                if count:
                    self._queues[queue_class].num_idle -= count

    def drop(self, blocks: BlockIds) -> BlockIds:
        """One user less for each of ``blocks``; returns those nobody uses now, in order, for the caller to queue."""
        left = self.references[blocks] - 1
        self.references[blocks] = left
        idle: BlockIds = blocks[left == 0]
        return idle

    def queue_back(self, idle: BlockIds, queue_class: int, now: float) -> None:
        """Blocks in no queue wait at the end of a class, the first of ``idle`` to be taken first."""
        if idle.size:
            self._queue(queue_class, idle).runs.append(_Run(idle, self._stamp(idle), now))

    def queue_front(self, idle: BlockIds, now: float) -> None:
        """Blocks in no queue are the next to be taken, the first of ``idle`` before the others."""
        if idle.size:
            self._queue(0, idle).runs.appendleft(_Run(idle, self._stamp(idle), now))

    def take(self, count: int) -> list[tuple[BlockIds, float]]:
        """The next ``count`` idle blocks, used once from here on: chunks, each with the time since when it was idle.

        The caller has seen to it that there are that many.
        """
        assert count <= self.num_idle
        taken: list[tuple[BlockIds, float]] = []
        for queue_class in self._classes:
            if not count:
                break
            for blocks, idle_since_s in self._pop(self._queues[queue_class], count):
                self.references[blocks] = 1
                self._stamps[blocks] = _IN_USE
                self.num_idle -= blocks.size
                count -= blocks.size
                taken.append((blocks, idle_since_s))
        return taken

    def shift(self, source: int, target: int, count: int) -> None:
        """The next ``count`` blocks of one class go to the end of another, in their order."""
        queue = self._queues.get(source)
        if queue is None:
            return
        for blocks, idle_since_s in list(self._pop(queue, min(count, queue.num_idle))):
            self.num_idle -= blocks.size
            self.queue_back(blocks, target, idle_since_s)

    def merge_classes(self) -> None:
        """All idle blocks wait in class 0, in the order in which they would have been taken."""
        for queue_class in self._classes[1:]:
            self.shift(queue_class, 0, self.num_idle_in(queue_class))

    def peek(self) -> tuple[int, float] | None:
        """The block that will be taken next and since when it has been idle; None when no block is."""
        for queue_class in self._classes:
            queue = self._queues[queue_class]
            for run in queue.runs if queue.num_idle else ():
                alive = self._alive(run)
                if alive.size:
                    return int(alive[0]), run.idle_since_s
        return None

    def in_order(self) -> list[int]:
        """Idle blocks, the next to be taken first. Linear."""
        return [block for c in self._classes for run in self._queues[c].runs for block in self._alive(run).tolist()]

    def check_invariants(self) -> None:
        """Raises ``AssertionError`` when counts and queues disagree. Linear; for tests."""
        order = self.in_order()
        assert len(order) == len(set(order)) == self.num_idle
        assert set(order) == set(np.flatnonzero(self.references[1:] == 0) + 1)
        assert (self.references >= 0).all()
        assert not self.references[0]
        for queue_class, queue in self._queues.items():
            blocks = [block for run in queue.runs for block in self._alive(run).tolist()]
            assert len(blocks) == queue.num_idle
            assert (self.class_of[blocks] == queue_class).all()
            assert queue.num_entries == sum(run.blocks.size - run.position for run in queue.runs)
        assert self._classes == sorted(self._queues)

    def _queue(self, queue_class: int, idle: BlockIds) -> _Queue:
        queue = self._queues.get(queue_class)
        if queue is None:
            queue = self._queues[queue_class] = _Queue(deque())
            self._classes = sorted(self._queues)
        if queue.num_entries > 2 * self.num_blocks + 64:
            self._sweep(queue)
        self.class_of[idle] = queue_class
        queue.num_idle += idle.size
        queue.num_entries += idle.size
        self.num_idle += idle.size
        return queue

    def _stamp(self, blocks: BlockIds) -> int:
        self._stamps_given += 1
        self._stamps[blocks] = self._stamps_given
        return self._stamps_given

    def _alive(self, run: _Run) -> BlockIds:
        rest = run.blocks[run.position :]
        alive: BlockIds = rest[self._stamps[rest] == run.stamp]
        return alive

    def _pop(self, queue: _Queue, count: int) -> Iterator[tuple[BlockIds, float]]:
        """Up to ``count`` alive blocks off the front, in chunks. The caller stamps them before it asks for more."""
        while count and queue.num_idle:
            run = queue.runs[0]
            end = min(run.position + count, run.blocks.size)
            chunk = run.blocks[run.position : end]
            queue.num_entries -= end - run.position
            run.position = end
            if end == run.blocks.size:
                queue.runs.popleft()
            alive = chunk[self._stamps[chunk] == run.stamp]
            if alive.size:
                count -= alive.size
                queue.num_idle -= alive.size
                yield alive, run.idle_since_s

    def _sweep(self, queue: _Queue) -> None:
        """Let go of dead entries; runs keep their order and times."""
        runs: deque[_Run] = deque()
        for run in queue.runs:
            alive = self._alive(run)
            if alive.size:
                runs.append(_Run(alive, run.stamp, run.idle_since_s))
        queue.runs = runs
        queue.num_entries = sum(run.blocks.size for run in runs)
