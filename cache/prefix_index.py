"""The router's view of all caches: how many leading blocks of a prompt each replica holds.

May be stale, is never needed for correctness. It takes each replica's snapshot and the numbered events after it,
skips what it has seen, and says when something is missing.

All chains of all replicas share one tree. A node is a *run*: keys that follow one another, in one packed array. What
a replica holds of a run is one integer (``cache.held``). A look-up compares a prompt with whole runs, not key by key.
Branches hang at positions of a run, so runs never split.

Events tell the first copy of a block that comes to a tier and the last that goes, so what they tell is always news. An
event that is none (a block stored that stands here already, one removed that does not) shows that the index was wrong
before it, be the count right or not: such a batch is applied and called ``CONTRADICTED``.

What is held is written down by a replica's record, not by its name. So a snapshot is taken in by a new record, part by
part, and then takes the old one's place at once; and what a record that has gone held is let go of part by part.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.block_hash import ROOT_KEY
from cache.events import Cleared, EventBatch, Removed, ReplicaId, Snapshot, Stored, Tier
from cache.held import Held, either, front_of, is_canonical, length_of, num_held, with_range, without_range
from cache.key_table import ABSENT, KeyTable


class Depths(NamedTuple):
    """Leading blocks a replica holds: ``device`` of them on its device, ``total`` of them in any tier."""

    device: int
    total: int


class Outcome(Enum):
    """What became of a batch."""

    APPLIED = "applied"
    STALE = "stale"
    """All of it was known, or it comes from a generation that has gone."""
    GAP = "gap"
    """Something before it is missing: nothing was applied, load a snapshot."""
    CONTRADICTED = "contradicted"
    """Applied, and what stood here before cannot have been right: load a snapshot."""


class _Run:
    """Keys in chain order, hanging at ``position`` of ``parent`` (None: at the root, or at a key not known yet)."""

    __slots__ = ("branches", "held", "keys", "number", "parent", "parent_key", "position", "used")

    def __init__(self, number: int, keys: array[int], parent: _Run | None, position: int, parent_key: int) -> None:
        self.number = number
        self.keys = keys
        self.parent = parent
        self.position = position
        self.parent_key = parent_key
        self.branches: dict[int, _Run] | None = None
        self.held: tuple[dict[_Replica, Held], dict[_Replica, Held]] = ({}, {})
        self.used = 0


class _Replica:
    """What is known of a replica: of the one that ``is_current``, or of one that comes or goes."""

    __slots__ = (
        "generation",
        "is_complete",
        "is_contradicted",
        "is_current",
        "name",
        "num_bad_events",
        "num_blocks",
        "runs",
        "seq",
    )

    def __init__(self, name: ReplicaId, generation: str, seq: int) -> None:
        self.name = name
        self.generation = generation
        self.seq = seq
        self.is_current = False
        self.num_blocks = [0, 0]
        self.num_bad_events = 0
        self.is_complete = True
        self.is_contradicted = False  # by an event of the batch that is being applied
        self.runs: dict[_Run, None] = {}  # in which it holds something; a run mostly comes after its parent


_MAX_REMEMBERED_DROPS = 4096
_PART_BLOCKS = 1024  # about a millisecond's work
_RUN_BLOCKS = 16  # a run costs as much as so many blocks of it
_POSITION_BITS = 32
_FEW = 64
"""Keys of which a set is quicker than numpy."""
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_NONE: Mapping[ReplicaId, Depths] = {}


class PrefixIndex:
    """Which replica holds which blocks, by tier. One thread owns it.

    ``max_blocks`` bounds the different blocks known: beyond it the runs unused for longest are forgotten.
    ``part_blocks`` is how many blocks are taken in or let go of in one part, and sets how fast its table grows.
    """

    def __init__(self, max_blocks: int = 16_000_000, part_blocks: int = _PART_BLOCKS) -> None:
        self.max_blocks = max_blocks
        self._part_blocks = part_blocks
        self._roomy = max_blocks * 9 // 10
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._gone: deque[_Replica] = deque()  # whose blocks still stand here
        self._dropped: dict[ReplicaId, str] = {}
        self._roots: dict[int, _Run] = {}
        self._orphans: dict[int, dict[int, _Run]] = {}
        self._runs: list[_Run | None] = []
        self._free_numbers: list[int] = []
        self._places = KeyTable(max(1, part_blocks // 128))
        self._num_host_blocks = 0
        self._tick = 0

    # Looking

    def match(self, keys: array[int]) -> Mapping[ReplicaId, Depths]:
        """Leading blocks of ``keys`` each replica holds; replicas that hold none are absent."""
        run = self._roots.get(keys[0]) if keys else None
        if run is None:
            return _NONE
        self._tick += 1
        query = _view(keys)
        device: dict[_Replica, int] = {}
        total: dict[_Replica, int] = device if not self._num_host_blocks else {}
        start = 0
        while run is not None:
            run.used = self._tick
            num_same = _num_same(_view(run.keys), query[start:])
            reached = _reach(run.held[Tier.DEVICE], device, start, num_same)
            if total is not device:
                reached = _reach(_union(run), total, start, num_same)
            start += num_same
            if not reached or start == len(keys) or run.branches is None:
                break
            branch = run.branches.get(keys[start])
            run = branch if branch is not None and branch.position == num_same - 1 else None
        known: dict[int, Depths] = {}
        depths: dict[ReplicaId, Depths] = {}
        for state, count in total.items():
            if not state.is_current:
                continue
            on_device = count if total is device else device.get(state, 0)
            if on_device == count:
                found = known.get(count)
                if found is None:
                    found = known[count] = Depths(count, count)
                depths[state.name] = found
            else:
                depths[state.name] = Depths(on_device, count)
        return depths

    def num_blocks(self, replica: ReplicaId, tier: Tier = Tier.DEVICE) -> int:
        """Blocks the replica holds in a tier; 0 for one that is not known."""
        state = self._replicas.get(replica)
        return state.num_blocks[tier] if state else 0

    def last_seq(self, replica: ReplicaId) -> int:
        """The number of the last event applied; 0 for a replica that is not known."""
        state = self._replicas.get(replica)
        return state.seq if state else 0

    def generation(self, replica: ReplicaId) -> str | None:
        """The generation whose blocks stand here."""
        state = self._replicas.get(replica)
        return state.generation if state else None

    def num_bad_events(self, replica: ReplicaId) -> int:
        """Events of this replica that made no sense and were skipped."""
        state = self._replicas.get(replica)
        return state.num_bad_events if state else 0

    def is_complete(self, replica: ReplicaId) -> bool:
        """Whether nothing of this replica was forgotten to stay within ``max_blocks``."""
        state = self._replicas.get(replica)
        return state.is_complete if state else True

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many more blocks can be taken in without others being forgotten soon."""
        return len(self._places) + num_blocks <= self._roomy

    @property
    def table_bytes(self) -> int:
        """Memory of the table of places, which is mapped: tracemalloc does not see it."""
        return self._places.num_bytes

    def num_parentless(self) -> int:
        """Blocks that match nothing since what comes before them was never told. Linear in them."""
        count = 0
        waiting = [run for siblings in self._orphans.values() for run in siblings.values()]
        while waiting:
            run = waiting.pop()
            count += len(run.keys)
            waiting += (run.branches or {}).values()
        return count

    def replicas(self) -> list[ReplicaId]:
        """Everyone who is known."""
        return list(self._replicas)

    def __len__(self) -> int:
        """Different blocks known, whoever holds them."""
        return len(self._places)

    # Changing

    def load(self, replica: ReplicaId, snapshot: Snapshot) -> None:
        """Replace all that is known of a replica, be it newer or older. In one go: see ``loading``."""
        for _ in self.loading(replica, snapshot.generation, snapshot.seq, snapshot.runs):
            pass

    def loading(
        self, replica: ReplicaId, generation: str, seq: int, runs: Iterable[Stored]
    ) -> Generator[None, None, None]:
        """The same in parts: a caller can do something else before the next one, about a millisecond's work.

        Until the last part the replica is as it was, and events for it are applied; then the snapshot stands, and the
        events after number ``seq`` have to come again. Where ``runs`` raises, or this is closed before its end, the
        replica stays as it is.
        """
        state = _Replica(replica, generation, seq)
        try:
            done = 0
            for event in runs:
                self._store(state, event)
                done += _RUN_BLOCKS + len(event.keys)
                if done >= self._part_blocks:
                    self._stay_within_bound()
                    yield
                    done = 0
            self._stay_within_bound()
            self._dropped.pop(replica, None)
            self._replace(self._replicas.get(replica), state)
        finally:
            if not state.is_current:
                self._gone.append(state)

    def sweep(self) -> bool:
        """Let go of a part, about a millisecond's work, of what is held by nobody any more; whether some is left."""
        done = 0
        while self._gone and done < self._part_blocks:
            state = self._gone[0]
            if not state.runs:
                self._gone.popleft()
                continue
            run, _ = state.runs.popitem()  # the last first: a run whose many branches all go is looked at once
            num_held_here = [num_held(held.pop(state, 0)) for held in run.held]
            self._num_host_blocks -= num_held_here[Tier.HOST]
            done += _RUN_BLOCKS + sum(num_held_here)
            self._trim(run)
        return bool(self._gone)

    def apply(self, replica: ReplicaId, batch: EventBatch) -> Outcome:
        """Apply the events not seen yet.

        Generations sort by age. A batch of an older one, or of one that was dropped, is ``STALE``; the first batch
        (event 1) of a new one replaces what was known; anything else that does not join on is a ``GAP``. One bad
        event is counted and skipped. Of a replica whose blocks were partly forgotten nothing is ``CONTRADICTED``.
        """
        state = self._replicas.get(replica)
        if state is None and batch.generation <= self._dropped.get(replica, ""):
            return Outcome.STALE
        if state is None or batch.generation > state.generation:
            if batch.first_seq != 1:
                return Outcome.GAP
            self._dropped.pop(replica, None)
            state = self._replace(state, _Replica(replica, batch.generation, 0))
        elif batch.generation < state.generation or batch.last_seq <= state.seq:
            return Outcome.STALE
        elif batch.first_seq > state.seq + 1:
            return Outcome.GAP
        was_complete, state.is_contradicted = state.is_complete, False
        for event in batch.events[state.seq + 1 - batch.first_seq :]:
            if isinstance(event, Stored):
                self._store(state, event)
            elif isinstance(event, Removed):
                self._remove(state, event)
            elif isinstance(event, Cleared):
                state = self._emptied(state)
            else:
                state.num_bad_events += 1
        state.seq = batch.last_seq
        self._stay_within_bound()
        return Outcome.CONTRADICTED if was_complete and state.is_contradicted else Outcome.APPLIED

    def skip_to(self, replica: ReplicaId, seq: int) -> None:
        """Go on after event ``seq``, as if those before it that are missing had said nothing."""
        state = self._replicas[replica]
        state.seq = max(state.seq, seq)

    def drop(self, replica: ReplicaId) -> None:
        """The replica has gone: forget it, and let no late event of that generation bring it back.

        ``load`` takes it in again.
        """
        state = self._replicas.pop(replica, None)
        if state is None:
            return
        self._retire(state)
        self._dropped.pop(replica, None)
        self._dropped[replica] = state.generation
        if len(self._dropped) > _MAX_REMEMBERED_DROPS:
            del self._dropped[next(iter(self._dropped))]

    def check_invariants(self) -> None:
        """Raises ``AssertionError`` when anything here contradicts anything else. Linear; for tests."""
        runs = [run for run in self._runs if run is not None]
        assert len(runs) + len(self._free_numbers) == len(self._runs)
        places = {key: run.number << _POSITION_BITS | position for run in runs for position, key in enumerate(run.keys)}
        keys, found = self._places.items()
        assert dict(zip(keys.tolist(), found.tolist(), strict=True)) == places
        assert len(places) == sum(len(run.keys) for run in runs)
        counted = {state: [0, 0] for state in self._replicas.values()}
        for run in runs:
            assert self._runs[run.number] is run
            assert run.keys
            assert self._siblings(run)[run.keys[0]] is run
            if run.parent is not None:
                assert run.parent.keys[run.position] == run.parent_key
            assert len(run.keys) == _needed_length(run)
            for tier, held in enumerate(run.held):
                for state, what in held.items():
                    assert what and length_of(what) <= len(run.keys)
                    assert is_canonical(what)
                    assert run in state.runs
                    counted.setdefault(state, [0, 0])[tier] += num_held(what)
        for replica, state in self._replicas.items():
            assert state.is_current
            assert state.name == replica
            assert state.num_blocks == counted[state]
        assert not any(state.is_current for state in self._gone)
        for state in counted:
            assert all(state in run.held[0] or state in run.held[1] for run in state.runs)
            assert all(self._runs[run.number] is run for run in state.runs)
        assert self._num_host_blocks == sum(count[Tier.HOST] for count in counted.values())
        assert not self._dropped.keys() & self._replicas.keys()
        assert all(self._orphans.values())

    # Inside

    def _store(self, state: _Replica, event: Stored) -> None:
        """Walk down from the parent, making the runs that are missing, and mark what is passed as held."""
        keys = event.keys
        parent: _Run | None = None
        position = -1
        if event.parent != ROOT_KEY:
            parent, position = self._locate(event.parent)
        above = event.parent
        done = 0
        while done < len(keys):
            run = parent
            if run is not None:
                if position + 1 < len(run.keys) and run.keys[position + 1] == keys[done]:
                    num_same = _num_same(_view(run.keys)[position + 1 :], _view(keys)[done:])
                    self._hold(state, run, event.tier, position + 1, position + 1 + num_same)
                    position += num_same
                    done += num_same
                    above = keys[done - 1]
                    continue
                branch = run.branches.get(keys[done]) if run.branches is not None else None
                if branch is not None and branch.position != position:
                    branch = None
            elif above == ROOT_KEY:
                branch = self._roots.get(keys[done])
            else:
                branch = self._orphans.get(above, {}).get(keys[done])
            if branch is not None:
                parent, position = branch, -1
                continue
            fresh = keys[done : done + self._num_unknown(keys[done:], above)]
            if not fresh or self._ends_in_a_circle(run, fresh):
                # A key that stands after another parent, or twice: the hashes of one scheme cannot do that.
                state.num_bad_events += 1
                state.is_contradicted = True
                return
            parent = self._grow(state, event.tier, run, position, above, fresh)
            position = len(parent.keys) - 1
            done += len(fresh)
            above = fresh[-1]

    def _ends_in_a_circle(self, run: _Run | None, fresh: array[int]) -> bool:
        """Whether what hangs above ``run`` waits for one of ``fresh``, which no chain of hashes can do."""
        if run is None or not self._orphans:
            return False
        while run.parent is not None:
            run = run.parent
        return run.parent_key != ROOT_KEY and run.parent_key in fresh

    def _grow(
        self, state: _Replica, tier: Tier, run: _Run | None, position: int, above: int, fresh: array[int]
    ) -> _Run:
        """Keys not known before follow ``above``: they lengthen a run that ends there or begin a new one."""
        if run is not None and position + 1 == len(run.keys):
            start = len(run.keys)
            run.keys += fresh
        else:
            number = self._free_numbers.pop() if self._free_numbers else len(self._runs)
            start = 0
            run = _Run(number, array("Q", fresh), run, position, above)
            if number == len(self._runs):
                self._runs.append(run)
            else:
                self._runs[number] = run
            self._siblings(run)[fresh[0]] = run
        self._places.insert_run(fresh, run.number << _POSITION_BITS | start)
        self._hold(state, run, tier, start, start + len(fresh))
        if self._orphans:
            for offset, key in enumerate(fresh, start):
                for orphan in self._orphans.pop(key, {}).values():
                    orphan.parent, orphan.position = run, offset
                    self._siblings(orphan)[orphan.keys[0]] = orphan
        return run

    def _hold(self, state: _Replica, run: _Run, tier: Tier, start: int, end: int) -> None:
        run.used = self._tick
        held = run.held[tier]
        before = held.get(state, 0)
        held[state] = after = with_range(before, start, end)
        state.runs[run] = None
        num_new = num_held(after) - num_held(before)
        if num_new != end - start:
            state.is_contradicted = True
        self._count(state, tier, num_new)

    def _remove(self, state: _Replica, event: Removed) -> None:
        """Chains are evicted from their ends, so most events are pieces of runs in falling order."""
        keys = event.keys
        done = 0
        while done < len(keys):
            run, position = self._locate(keys[done])
            if run is None:
                state.is_contradicted = True
                done += 1
                continue
            count = 1
            if position and done + 1 < len(keys) and keys[done + 1] == run.keys[position - 1]:
                falling = _view(run.keys)[position::-1]
                count = _num_same(falling, _view(keys)[done:])
                del falling
            self._release(state, run, event.tier, position + 1 - count, position + 1)
            done += count

    def _release(self, state: _Replica, run: _Run, tier: Tier, start: int, end: int) -> None:
        before = run.held[tier].get(state, 0)
        after = without_range(before, start, end)
        num_gone = num_held(before) - num_held(after)
        if num_gone != end - start:
            state.is_contradicted = True
        if not num_gone:
            return
        self._set_held(state, run, tier, after)
        self._count(state, tier, -num_gone)
        self._trim(run)

    def _set_held(self, state: _Replica, run: _Run, tier: int, what: Held) -> None:
        if what:
            run.held[tier][state] = what
            return
        run.held[tier].pop(state, None)
        if state not in run.held[1 - tier]:
            state.runs.pop(run, None)

    def _count(self, state: _Replica, tier: int, change: int) -> None:
        state.num_blocks[tier] += change
        if tier == Tier.HOST:
            self._num_host_blocks += change

    def _trim(self, run: _Run) -> None:
        """Let go of the end of a run that nobody holds and nothing hangs at; of the whole run, then of its parent."""
        above: _Run | None = run
        while above is not None:
            run, above = above, None
            length = _needed_length(run)
            if length == len(run.keys):
                return
            self._places.delete_many(run.keys[length:])
            if length:
                del run.keys[length:]
                return
            above = run.parent
            self._unhang(run)
            self._runs[run.number] = None
            self._free_numbers.append(run.number)
            run.keys = array("Q")

    def _unhang(self, run: _Run) -> None:
        siblings = self._siblings(run)
        del siblings[run.keys[0]]
        if run.parent is not None:
            if not siblings:
                run.parent.branches = None
        elif run.parent_key != ROOT_KEY and not siblings:
            del self._orphans[run.parent_key]

    def _siblings(self, run: _Run) -> dict[int, _Run]:
        """What hangs where ``run`` hangs or is to hang, by first key."""
        if run.parent is not None:
            if run.parent.branches is None:
                run.parent.branches = {}
            return run.parent.branches
        return self._roots if run.parent_key == ROOT_KEY else self._orphans.setdefault(run.parent_key, {})

    def _replace(self, old: _Replica | None, new: _Replica) -> _Replica:
        """The one is no longer what is known, the other is."""
        if old is not None:
            self._retire(old)
        new.is_current = True
        self._replicas[new.name] = new
        return new

    def _emptied(self, state: _Replica) -> _Replica:
        empty = _Replica(state.name, state.generation, state.seq)
        empty.num_bad_events, empty.is_contradicted = state.num_bad_events, state.is_contradicted
        return self._replace(state, empty)

    def _retire(self, state: _Replica) -> None:
        """Nothing is known by it any more; what it held goes by and by, where it is not much at once."""
        state.is_current = False
        self._gone.append(state)
        self.sweep()

    def _stay_within_bound(self) -> None:
        """Forget the runs unused for longest that nothing hangs at, until a tenth of the bound is free."""
        while len(self._places) > self.max_blocks:
            if self._gone:
                self.sweep()
                continue
            leaves = sorted(
                (run for run in self._runs if run is not None and run.branches is None), key=lambda run: run.used
            )
            for run in leaves:
                if len(self._places) <= self._roomy:
                    break
                for tier, held in enumerate(run.held):
                    for state, what in list(held.items()):
                        state.is_complete = False
                        self._count(state, tier, -num_held(what))
                        self._set_held(state, run, tier, 0)
                self._trim(run)

    def _locate(self, key: int) -> tuple[_Run | None, int]:
        place = self._places.find(key)
        if place == ABSENT:
            return None, -1
        return self._runs[place >> _POSITION_BITS], place & _POSITION_MASK

    def _num_unknown(self, keys: array[int], above: int) -> int:
        """Leading keys that stand nowhere yet and are all different."""
        count = self._places.num_absent(keys)
        if not _are_different(keys[:count], above):
            known = {above}
            for position, key in enumerate(keys[:count]):
                if key in known:
                    return position
                known.add(key)
        return count


def _are_different(keys: array[int], other: int) -> bool:
    """From one another and from ``other``."""
    if len(keys) <= _FEW:
        return len({other, *keys}) > len(keys)
    ordered = np.sort(_view(keys))
    return not ((ordered[1:] == ordered[:-1]).any() or (ordered == np.uint64(other)).any())


def _view(keys: array[int]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(keys, dtype=np.uint64)


def _num_same(keys: npt.NDArray[np.uint64], query: npt.NDArray[np.uint64]) -> int:
    """Leading keys that both have in common."""
    length = min(keys.size, query.size)
    differs = keys[:length] != query[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def _reach(held: Mapping[_Replica, Held], depths: dict[_Replica, int], start: int, num_same: int) -> bool:
    """Deepen whoever got as far as ``start`` by the front of a run; whether anybody got through all of it."""
    reached = False
    for state, what in held.items():
        if not start or depths.get(state) == start:
            front = what if what >= 0 else front_of(what)
            if front >= num_same:
                front = num_same
                reached = True
            if front:
                depths[state] = start + front
    return reached


def _union(run: _Run) -> Mapping[_Replica, Held]:
    """What each replica holds of a run in any tier."""
    device, host = run.held
    if not host:
        return device
    return dict(device) | {state: either(device.get(state, 0), host[state]) for state in host}


def _needed_length(run: _Run) -> int:
    """Up to where somebody holds a block of the run or something hangs at it."""
    full = len(run.keys)
    length = 0
    for held in run.held:
        for what in held.values():
            length = max(length, length_of(what))
            if length == full:
                return full
    if run.branches is not None:
        length = max(length, 1 + max(branch.position for branch in run.branches.values()))
    return length
