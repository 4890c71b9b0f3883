"""The control loop over parts in memory: what it makes of what it sees, and what it tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from warmfront_pb.v1 import common_pb2

from common.redis_keys import FleetKeys
from router.autoscale import Autoscale
from router.controller import Controller
from router.launcher import MAX_STRIKES, Desired
from router.reconcile import DRAINING, READY, Group
from tests.fakes.memory_launcher import MemoryLauncher

NOBODY = "redis://127.0.0.1:1/0"


def wish(count: int = 2, *, redis_url: str = NOBODY, autoscale: Autoscale | None = None, **settings: Any) -> Desired:
    group = Group(role="worker", count=count, settings=settings)
    return Desired(fleet="looped", redis_url=redis_url, groups=(group,), autoscale=autoscale)


class Loop:
    """A controller that looks when it is told to."""

    def __init__(self, folder: Path, desired: Desired, launcher: MemoryLauncher | None = None) -> None:
        self.folder, self.wish, self.launcher = folder, desired, launcher or MemoryLauncher()
        self.error: Exception | None = None
        self._controller = Controller(self._read, lambda _: self.launcher, folder)
        self._controller.stop()  # its own thread

    def _read(self) -> Desired:
        if self.error is not None:
            raise self.error
        return self.wish

    def look(self, times: int = 6) -> dict[str, Any]:
        """The status afterwards."""
        for _ in range(times):
            self._controller.look()
        status: dict[str, Any] = json.loads((self.folder / "status.json").read_text(encoding="utf-8"))
        return status

    def workers(self) -> dict[str, Any]:
        group: dict[str, Any] = self.look(1)["groups"]["worker"]
        return group


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    one = Loop(tmp_path, wish())
    one.look()
    return one


def test_what_is_wanted_runs_and_its_files_are_for_their_owner_alone(loop: Loop) -> None:
    assert loop.workers()["phase"] == "steady"
    assert [path.stat().st_mode & 0o777 for path in loop.folder.iterdir()] == [0o600, 0o600]


def test_a_file_that_is_refused_changes_nothing_and_is_told(loop: Loop) -> None:
    loop.error = ValueError("workers.replica: no such key")
    status = loop.look()
    assert status["desired_error"] == "workers.replica: no such key"
    assert (status["groups"]["worker"]["ready"], len(loop.launcher.started)) == (2, 2)
    loop.error = None
    assert loop.look()["desired_error"] == ""


def test_a_controller_serves_one_fleet(loop: Loop) -> None:
    loop.wish = replace(loop.wish, fleet="another")
    assert "start another controller" in loop.look()["desired_error"]
    assert len(loop.launcher.parts) == 2


def test_one_that_hangs_is_replaced_after_the_strikes_and_not_before(loop: Loop) -> None:
    loop.launcher.parts["w0"] = replace(loop.launcher.parts["w0"], answers=False, error="no answer")
    loop.look(MAX_STRIKES - 1)
    assert loop.launcher.replaced == []
    loop.look(1)
    assert loop.launcher.replaced == ["w0"]


def test_one_that_drains_is_none_that_hangs(loop: Loop) -> None:
    seen = loop.launcher.parts["w0"]
    for _ in range(3 * MAX_STRIKES):
        loop.launcher.parts["w0"] = replace(seen, state=DRAINING, error="its server is not healthy")
        loop.look(1)
    assert loop.launcher.replaced == []
    loop.look(2)
    assert (loop.workers()["held_out"], list(loop.launcher.parts)) == (["w0"], ["w1"])


def test_one_that_somebody_drains_is_not_replaced_while_it_drains_either(loop: Loop) -> None:
    loop.launcher.parts["w0"] = replace(loop.launcher.parts["w0"], state=DRAINING)
    loop.look()
    assert (loop.workers()["held_out"], loop.launcher.started) == (["w0"], ["w0", "w1"])


def test_the_same_count_asked_for_again_brings_back_what_was_drained(loop: Loop) -> None:
    loop.launcher.parts["w0"] = replace(loop.launcher.parts["w0"], state=DRAINING)
    loop.look()
    loop.wish = replace(loop.wish, groups=(replace(loop.wish.groups[0], attempt=1),))
    loop.look()
    assert (loop.workers()["held_out"], loop.workers()["ready"]) == ([], 2)


def test_what_still_drains_when_the_count_is_asked_for_again_is_replaced_too(loop: Loop) -> None:
    seen = loop.launcher.parts["w0"]
    for _ in range(3):  # a drain that takes its time
        loop.launcher.parts["w0"] = replace(seen, state=DRAINING)
        loop.look(1)
    loop.wish = replace(loop.wish, groups=(replace(loop.wish.groups[0], attempt=1),))
    for _ in range(3):
        loop.launcher.parts["w0"] = replace(seen, state=DRAINING)
        loop.look(1)
    loop.look()
    assert (loop.workers()["held_out"], sorted(loop.launcher.parts)) == ([], ["w1", "w2"])


def test_one_that_gives_no_answer_in_its_group_s_time_is_started_anew(loop: Loop) -> None:
    hasty = replace(loop.wish.groups[0], count=3, start_s=0)
    loop.launcher.silent = {"w2", "w3"}
    loop.wish = replace(loop.wish, groups=(hasty,))
    loop.look(MAX_STRIKES + 2)
    assert loop.launcher.replaced == ["w2"]
    patient = Loop(loop.folder, replace(loop.wish, groups=(replace(hasty, count=4, start_s=600),)), loop.launcher)
    patient.look(3 * MAX_STRIKES)
    assert "w3" in loop.launcher.started
    assert "w3" not in loop.launcher.replaced


def test_a_controller_that_starts_in_the_middle_of_a_roll_takes_no_drain_for_somebody_else_s(loop: Loop) -> None:
    loop.launcher.stays = True  # what drains takes its time
    loop.wish = wish(kind="new")
    while not any(seen.state == DRAINING for seen in loop.launcher.parts.values()):
        loop.look(1)
    after = Loop(loop.folder, loop.wish, loop.launcher)
    after.look(2)
    loop.launcher.stays = False
    after.look(12)
    assert (after.workers()["phase"], after.workers()["ready"], after.workers()["held_out"]) == ("steady", 2, [])


def test_the_next_controller_knows_what_to_go_back_to(loop: Loop) -> None:
    good = loop.wish.groups[0].revision
    loop.launcher.faults = {wish(kind="bad").groups[0].revision: "it cannot be"}
    after = Loop(loop.folder, wish(kind="bad"), loop.launcher)
    after.look()
    assert after.workers()["phase"] == "rolled back"
    assert {seen.revision for seen in after.launcher.parts.values()} == {good}
    last = Loop(loop.folder, wish(kind="bad"), loop.launcher)
    assert last.look()["groups"]["worker"]["why"] == "w2: it cannot be", "the next one does not try it again"
    assert after.launcher.started == ["w0", "w1", "w2"]


def test_rubbish_in_the_memory_of_an_earlier_one_is_no_harm(tmp_path: Path) -> None:
    (tmp_path / "memory.json").write_text('{"memories": {"worker": {"odd": 1}}, "groups": [3]}')
    loop = Loop(tmp_path, wish())
    assert loop.look()["groups"]["worker"]["phase"] == "steady"


@pytest.fixture
def leases(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client
        client.flushdb()


def lease(client: redis.Redis, name: str, waiting_tokens: int) -> None:
    keys = FleetKeys("looped")
    one = common_pb2.ReplicaLease(replica=name, generation="1", state=common_pb2.READY)
    one.load.waiting_tokens, one.load.prefill_tokens_per_s = waiting_tokens, 1000
    client.zadd(keys.replicas, {name: 1})
    client.set(keys.replica(name), one.SerializeToString())


def test_workers_follow_the_work_that_waits_and_a_new_controller_keeps_their_number(
    leases: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    autoscale = Autoscale(min=2, max=5, target_wait_s=0.5, up_window_s=0, down_window_s=3600)
    loop = Loop(tmp_path, wish(2, redis_url=redis_url, autoscale=autoscale))
    loop.look()
    assert loop.workers()["ready"] == 2
    for name in ("w0", "w1"):
        lease(leases, name, 1000)  # a second each: twice two workers' share
    assert (loop.look()["groups"]["worker"]["count"], loop.workers()["ready"]) == (4, 4)
    assert loop.look()["signal"]["work"] == 4
    for name in ("w0", "w1"):
        lease(leases, name, 0)
    after = Loop(tmp_path, loop.wish, loop.launcher)
    assert (after.look()["groups"]["worker"]["count"], len(after.launcher.parts)) == (4, 4)
    assert all(seen.state == READY for seen in after.launcher.parts.values())


def test_a_new_controller_does_not_count_what_a_roll_adds_to_an_autoscaled_fleet(tmp_path: Path) -> None:
    autoscale = Autoscale(min=2, max=9)
    loop = Loop(tmp_path, wish(2, autoscale=autoscale))
    loop.look()
    loop.launcher.stays = True
    loop.wish = wish(2, autoscale=autoscale, kind="new")
    while len(loop.launcher.parts) < 3:
        loop.look(1)
    after = Loop(tmp_path, loop.wish, loop.launcher)
    assert after.look(2)["groups"]["worker"]["count"] == 2
