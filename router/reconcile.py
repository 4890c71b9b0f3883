"""What to do so that the parts that run become the parts that are wanted. A plain function, the clock passed in.

A group is the routers or the workers of a fleet. Its settings have a name, the revision; parts of another revision are
replaced batch by batch: new ones start, and when they are READY as many old ones drain. A rollout that fails (a new
part ends with a fault, starts again before it is READY, or the deadline passes) is rolled back by the same steps in
the other direction. What must be known from one look to the next is a ``Memory``.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

STARTING, WARMING, READY, DRAINING, GONE = "STARTING", "WARMING", "READY", "DRAINING", "GONE"
MAX_STARTING = 16  # parts that start at once: a mistyped count must not take all of a machine before it is corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How parts are replaced."""

    surge: int = 1  # parts beyond the count while it lasts; 0: an old one goes first
    batch: int = 1  # parts that are replaced at once
    when_below_s: float | None = None  # seconds of prefill waiting per ready worker; above it no batch begins
    deadline_s: float = 1800.0  # of the whole rollout; then it is rolled back
    attempt: int = 0  # a higher one replaces parts whose settings have not changed

    def __post_init__(self) -> None:
        if self.surge < 0 or self.batch < 1 or not self.deadline_s > 0:
            raise ValueError("a rollout needs surge >= 0, batch >= 1 and a deadline over 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The parts of one role that should run."""

    role: str  # router or worker
    count: int
    each_node: bool = False  # the count is that of the nodes on which one can be placed
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)  # their flags
    placement: Mapping[str, Any] = field(default_factory=dict)  # what each takes of a machine
    rollout: Rollout = field(default_factory=Rollout)
    start_s: float = 600.0  # until a part's first good answer; one that takes longer is started anew
    drain_s: float = 30.0  # what a part that goes still answers may take so long
    attempt: int = 0  # a higher one brings back parts that somebody has drained, at the same count

    @property
    def revision(self) -> str:
        """The name of these settings: 8 hex digits, equal for equal settings."""
        known = [self.settings, self.placement, self.rollout.attempt]
        return hashlib.sha256(json.dumps(known, sort_keys=True, default=dict).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One router or worker as it was last seen."""

    name: str
    revision: str
    state: str
    fault: str = ""  # why it is not READY, where it failed
    is_held: bool = False  # somebody drains it and wants none in its place

    @property
    def is_ready(self) -> bool:
        """Whether users are served by it."""
        return self.state == READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is remembered of a group. Can be written as JSON and read again by ``Memory(**values)``."""

    good: str = ""  # the last revision of which all parts were READY
    target: str = ""  # the revision that a rollout goes to, while it lasts
    began_s: float = 0.0  # of that rollout
    failed: str = ""  # the revision that was rolled back
    why: str = ""  # it was
    timed_out: bool = False  # it was for its deadline
    count: int = 0  # that was wanted when ``held_out`` was noted
    attempt: int = 0  # and the group's own
    held_out: tuple[str, ...] = ()  # parts that were drained by somebody else: they are not replaced

    def asks_again(self, group: Group) -> bool:
        """Whether a count is asked for since: then what was drained is replaced."""
        return (self.count, self.attempt) != (group.count, group.attempt)


@dataclass(frozen=True, slots=True)
class Start:
    """Start a part of this revision."""

    name: str
    revision: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take a part out of service for good; what it answers may end."""

    name: str


Action: TypeAlias = Start | Drain


def plan(
    group: Group,
    parts: Sequence[Part],
    memory: Memory,
    *,
    now: float,
    wait_s: float = 0.0,
    taken: Collection[str] = (),
    prefix: str = "",
) -> tuple[list[Action], Memory]:
    """The next actions, and what to remember. ``wait_s``: prefill that waits per ready worker, in seconds.

    New parts are called ``prefix`` and the lowest number that no part and none of ``taken`` has. To call it again
    before the actions have shown in ``parts`` gives the same actions again.
    """
    if memory.asks_again(group):
        memory = replace(memory, count=group.count, attempt=group.attempt, held_out=())
    memory = _judge(group, parts, memory, now)
    target = target_of(group, memory)
    want = max(0, group.count - len(memory.held_out) - sum(part.is_held for part in parts))
    alive = [part for part in parts if part.state != DRAINING]  # what has failed too: its launcher tries again
    new = [part for part in alive if part.revision == target]
    old = [part for part in alive if part.revision != target]
    num_ending = sum(part.state == DRAINING and not part.is_held for part in parts)
    is_halted = memory.failed == target  # nothing to go back to: what serves goes on, what failed ends
    if is_halted and old:
        return [Drain(part.name) for part in new if not part.is_ready], memory

    rule = group.rollout
    num_pending = sum(not part.is_ready for part in new)
    starts, drains = want - len(new), []
    if old:
        is_open = target == memory.good or rule.when_below_s is None or wait_s <= rule.when_below_s
        room = want + rule.surge - len(alive) - num_ending
        starts = min(starts, room, rule.batch - num_pending) if is_open else 0
        ready_old = [part for part in old if part.is_ready]
        # What ran well and is down for now comes back, should the new ones fail; what never ran goes at once.
        down = [part for part in old if not part.is_ready and part.revision == memory.good]
        broken = [part for part in old if not part.is_ready and part.revision != memory.good]
        bonus = rule.batch if rule.surge == 0 and is_open and not (num_pending or num_ending) and len(new) < want else 0
        spare = len(new) - num_pending - want + bonus
        drains = (
            broken + down[: max(0, len(down) + len(ready_old) + spare)] + ready_old[: max(0, len(ready_old) + spare)]
        )
    if starts < 0:
        drains += _surplus(new)[: len(new) - want] if len(new) > want else []
    actions: list[Action] = [Drain(part.name) for part in drains]
    used = {part.name for part in parts} | set(taken)
    starts = min(starts, MAX_STARTING - num_pending)
    actions += [Start(name, target) for name in free_names(prefix, used, max(0, starts))]
    if not old and not actions and not num_ending and not num_pending and target != memory.good:
        memory = replace(memory, good=target, target="")
    return actions, memory


def target_of(group: Group, memory: Memory) -> str:
    """The revision that parts should have: the wanted one, or the last good one where the wanted one has failed."""
    return memory.good if group.revision == memory.failed and memory.good else group.revision


def phase_of(group: Group, parts: Sequence[Part], memory: Memory) -> str:
    """Where a group stands: starting, rolling, steady, rolling back, rolled back, halted."""
    target, failed = target_of(group, memory), memory.failed == group.revision
    is_settled = all(part.revision == target and part.state != DRAINING for part in parts)
    if failed and not memory.good:
        return "halted"
    if failed:
        return "rolled back" if is_settled else "rolling back"
    if memory.good == target and is_settled:
        return "steady"
    return "rolling" if memory.good or not is_settled else "starting"


def free_names(prefix: str, used: Collection[str], count: int) -> Iterator[str]:
    """The first ``count`` of prefix0, prefix1, ... that are not used."""
    number = 0
    while count > 0:
        if (name := f"{prefix}{number}") not in used:
            yield name
            count -= 1
        number += 1


def hold_out(memory: Memory, name: str) -> Memory:
    """A part leaves because somebody drained it: none is started in its place until a count is asked for again."""
    return replace(memory, held_out=tuple(sorted({*memory.held_out, name})))


def _judge(group: Group, parts: Sequence[Part], memory: Memory, now: float) -> Memory:
    """Begins a rollout, or finds that it has failed."""
    revision = group.revision
    if memory.failed and memory.failed != revision:
        memory = replace(memory, failed="", why="", timed_out=False)
    is_first = not memory.good and all(part.revision == revision for part in parts)
    if revision in (memory.good, memory.failed) or is_first:
        return replace(memory, target="") if memory.target else memory
    if memory.target != revision:
        return replace(memory, target=revision, began_s=now)
    faults = [f"{part.name}: {part.fault}" for part in parts if part.revision == revision and part.fault]
    if faults:
        return replace(memory, target="", failed=revision, why=faults[0])
    num_ready = sum(part.is_ready and part.revision == revision for part in parts)
    if now - memory.began_s > group.rollout.deadline_s and num_ready < group.count:
        why = f"{num_ready} of {group.count} were READY after {group.rollout.deadline_s:g} s"
        return replace(memory, target="", failed=revision, why=why, timed_out=True)
    return memory


def _surplus(parts: Sequence[Part]) -> list[Part]:
    """In the order in which they may go: those that do not serve first, then the youngest names."""
    return sorted(parts, key=lambda part: (not part.is_ready, len(part.name), part.name), reverse=True)
