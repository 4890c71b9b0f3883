"""What is done so that what runs becomes what is wanted: one look after another, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.reconcile import (
    DRAINING,
    MAX_STARTING,
    READY,
    STARTING,
    Action,
    Drain,
    Group,
    Memory,
    Part,
    Rollout,
    Start,
    free_names,
    hold_out,
    phase_of,
    plan,
)


def workers(count: int, *, model: str = "a", **rollout: object) -> Group:
    return Group(role="worker", count=count, settings={"model": model}, rollout=Rollout(**rollout))  # type: ignore[arg-type]


@dataclass
class World:
    """Parts that do what they are told, one look later."""

    group: Group
    parts: dict[str, Part] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    now: float = 0.0
    wait_s: float = 0.0
    faulty: set[str] = field(default_factory=set)  # revisions whose parts fail
    slow: bool = False  # new parts stay STARTING
    least_ready: int = 99
    most_parts: int = 0

    def look(self) -> list[Action]:
        actions, self.memory = plan(
            self.group, list(self.parts.values()), self.memory, now=self.now, wait_s=self.wait_s, prefix="w"
        )
        for name, part in list(self.parts.items()):
            if part.state == DRAINING:
                del self.parts[name]
            elif part.state == STARTING and part.revision in self.faulty:
                self.parts[name] = replace(part, fault="it has no such file")
            elif part.state == STARTING and not self.slow:
                self.parts[name] = replace(part, state=READY)
        for action in actions:
            if isinstance(action, Start):
                assert action.name not in self.parts
                self.parts[action.name] = Part(name=action.name, revision=action.revision, state=STARTING)
            elif action.name in self.parts:
                self.parts[action.name] = replace(self.parts[action.name], state=DRAINING)
        self.now += 1
        self.least_ready = min(self.least_ready, self.num_ready)
        self.most_parts = max(self.most_parts, len(self.parts))
        return actions

    def settle(self, looks: int = 60) -> World:
        for _ in range(looks):
            self.look()
        return self

    def begin(self, group: Group) -> World:
        """Another wish; what is measured begins anew."""
        self.group, self.least_ready, self.most_parts = group, 99, 0
        return self

    @property
    def num_ready(self) -> int:
        return sum(part.is_ready for part in self.parts.values())

    @property
    def phase(self) -> str:
        return phase_of(self.group, list(self.parts.values()), self.memory)


def test_a_fleet_starts_whole_and_is_then_steady() -> None:
    world = World(workers(3))
    assert world.look() == [Start(f"w{n}", world.group.revision) for n in range(3)]
    assert world.phase == "starting"
    world.settle(3)
    assert (world.phase, world.look(), world.memory.good) == ("steady", [], world.group.revision)


def test_scaling_up_starts_the_lowest_free_names_and_down_drains_the_highest() -> None:
    world = World(workers(2)).settle(4)
    world.group = workers(4)
    assert [action.name for action in world.look()] == ["w2", "w3"]
    world.settle(3)
    world.group = workers(1)
    assert world.look() == [Drain("w3"), Drain("w2"), Drain("w1")]
    assert sorted(world.settle(3).parts) == ["w0"]


def test_a_part_that_ran_well_and_is_down_is_kept_until_a_new_one_serves() -> None:
    world = World(workers(1)).settle(4)
    good = world.group.revision
    world.parts["w0"] = replace(world.parts["w0"], state=STARTING)  # it died and is started again
    world.slow = True
    world.begin(workers(1, model="bad")).settle(3)
    assert world.parts["w0"].revision == good
    world.slow = False
    world.faulty = {world.group.revision}
    world.settle(6)
    assert [(part.revision, part.state) for part in world.parts.values()] == [(good, READY)]
    world.begin(workers(1, model="b")).settle(6)
    assert [part.revision for part in world.parts.values()] == [world.group.revision]


def test_a_great_many_start_a_few_at_a_time_so_that_a_mistyped_count_can_be_taken_back() -> None:
    world = World(workers(1000), slow=True).settle(5)
    assert len(world.parts) == MAX_STARTING
    world.group = workers(3)
    assert len(world.settle(3).parts) == 3
    world.group, world.slow = workers(40), False
    assert world.settle(20).num_ready == 40


def test_a_part_that_does_not_serve_goes_before_one_that_does() -> None:
    world = World(workers(2)).settle(4)
    world.parts["w0"] = replace(world.parts["w0"], state=STARTING)
    world.group = workers(1)
    assert world.look() == [Drain("w0")]


@pytest.mark.parametrize(("surge", "batch"), [(1, 1), (2, 2), (2, 1), (1, 3), (4, 4)])
def test_a_rollout_with_surge_never_serves_with_fewer_and_never_has_more_than_it_may(surge: int, batch: int) -> None:
    world = World(workers(4)).settle(4).begin(workers(4, model="b", surge=surge, batch=batch))
    world.settle()
    assert {part.revision for part in world.parts.values()} == {world.group.revision}
    assert (world.phase, world.least_ready, world.most_parts <= 4 + surge) == ("steady", 4, True)


@pytest.mark.parametrize("batch", [1, 2])
def test_without_surge_a_batch_goes_first_and_no_more(batch: int) -> None:
    world = World(workers(4)).settle(4).begin(workers(4, model="b", surge=0, batch=batch))
    world.settle()
    assert (world.phase, world.least_ready, world.most_parts) == ("steady", 4 - batch, 4)


def test_a_rollout_that_fails_is_rolled_back_and_says_why() -> None:
    world = World(workers(3)).settle(4)
    good = world.group.revision
    world.begin(workers(3, model="b"))
    world.faulty = {world.group.revision}
    world.look()
    assert world.phase == "rolling"
    world.settle()
    assert (world.phase, world.least_ready) == ("rolled back", 3)
    assert {part.revision for part in world.parts.values()} == {good}
    assert (world.memory.failed, world.memory.why) == (world.group.revision, "w3: it has no such file")
    assert world.look() == [], "it is not tried again"


def test_the_same_settings_are_tried_again_by_a_new_attempt() -> None:
    world = World(workers(2)).settle(4).begin(workers(2, model="b"))
    world.faulty = {world.group.revision}
    world.settle()
    world.faulty = set()
    world.begin(workers(2, model="b", attempt=1)).settle()
    assert (world.phase, world.memory.failed) == ("steady", "")


def test_a_rollout_that_fails_half_way_brings_the_old_ones_back() -> None:
    world = World(workers(4)).settle(4)
    good = world.group.revision
    world.begin(workers(4, model="b"))
    world.settle(6)
    assert len({part.revision for part in world.parts.values()}) == 2
    world.faulty = {world.group.revision}
    world.settle()
    assert (world.phase, world.least_ready) == ("rolled back", 4)
    assert [part.revision for part in world.parts.values()] == [good] * 4


def test_a_rollout_whose_deadline_passes_is_rolled_back_and_says_that_it_was_time() -> None:
    world = World(workers(2)).settle(4).begin(workers(2, model="b", deadline_s=10))
    world.slow = True
    world.settle(9)
    assert world.phase == "rolling"
    world.settle(5)
    assert (world.phase, world.memory.timed_out, world.num_ready) == ("rolled back", True, 2)
    assert world.memory.why == "0 of 2 were READY after 10 s"


def test_a_rollout_whose_new_parts_all_serve_at_the_deadline_goes_on_to_its_end() -> None:
    world = World(workers(1)).settle(4).begin(workers(1, model="b", deadline_s=2.5))
    world.settle(8)
    assert (world.phase, world.memory.good, world.least_ready) == ("steady", world.group.revision, 1)


def test_no_batch_begins_above_the_load_and_what_has_begun_goes_on() -> None:
    world = World(workers(3)).settle(4).begin(workers(3, model="b", when_below_s=0.5, deadline_s=1000))
    world.wait_s = 0.6
    world.settle(10)
    assert {part.revision for part in world.parts.values()} == {world.memory.good}
    world.wait_s = 0.4
    world.look()
    world.wait_s = 9.0
    world.settle(10)
    assert sum(part.revision == world.group.revision for part in world.parts.values()) == 1
    assert (world.num_ready, len(world.parts)) == (3, 3)
    world.wait_s = 0.5
    assert world.settle().phase == "steady"


def test_with_nothing_to_go_back_to_it_halts_and_what_serves_goes_on() -> None:
    world = World(workers(2, model="b"))
    world.parts = {name: Part(name=name, revision="unknown", state=READY) for name in ("w0", "w1")}
    world.faulty = {world.group.revision}
    world.settle()
    assert (world.phase, sorted(world.parts), world.num_ready) == ("halted", ["w0", "w1"], 2)
    assert world.look() == []


def test_a_controller_that_remembers_nothing_adopts_what_runs() -> None:
    world = World(workers(2)).settle(4)
    world.memory = Memory()
    assert (world.look(), world.memory.good) == ([], world.group.revision)


def test_one_that_somebody_drained_is_not_replaced_until_the_count_changes() -> None:
    world = World(workers(3)).settle(4)
    del world.parts["w1"]
    world.memory = hold_out(world.memory, "w1")
    assert (world.look(), world.phase) == ([], "steady")
    world.group = workers(4)
    assert [action.name for action in world.look()] == ["w1", "w3"]


def test_one_that_vanished_is_started_again() -> None:
    world = World(workers(2)).settle(4)
    del world.parts["w0"]
    assert world.look() == [Start("w0", world.group.revision)]


def test_names_in_use_elsewhere_are_left_alone() -> None:
    assert list(free_names("w", {"w0", "w2", "other"}, 3)) == ["w1", "w3", "w4"]


def test_a_revision_is_the_same_for_the_same_settings_and_no_other() -> None:
    assert workers(1).revision == workers(5).revision, "the count is none of them"
    assert workers(1, surge=3).revision == workers(1).revision
    assert len({workers(1).revision, workers(1, model="b").revision, workers(1, attempt=1).revision}) == 3


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.sampled_from(["a", "b", "c", "bad", "more", "fewer", "kill", "look"]), max_size=30),
)
def test_whatever_happens_it_settles_with_the_count_that_is_wanted(
    count: int, surge: int, batch: int, events: list[str]
) -> None:
    world = World(workers(count)).settle(4)
    world.faulty = {workers(1, model="bad").revision}
    for event in events:
        if event in ("a", "b", "c", "bad"):
            world.group = workers(world.group.count, model=event, surge=surge, batch=batch)
        elif event in ("more", "fewer"):
            step = 1 if event == "more" else -1
            world.group = replace(world.group, count=max(1, world.group.count + step))
        elif event == "kill" and world.parts:
            world.parts.pop(min(world.parts))
        world.look()
    world.settle(200)
    assert world.num_ready == len(world.parts) == world.group.count
    assert world.phase in ("steady", "rolled back")
    assert len({part.revision for part in world.parts.values()}) == 1
