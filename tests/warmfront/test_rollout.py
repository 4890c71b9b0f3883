"""`warmfront scale` and `rollout` on a real cluster with simulated engines, while requests go on."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.http_router import FakeRouter
from tests.support import wait_until
from tests.warmfront.conftest import Cli
from tests.warmfront.test_cluster import Up, ask, started
from warmfront.desired import read_desired
from warmfront.errors import Failure, WrongUse
from warmfront.processes import end_of
from warmfront.rollout import change_settings
from warmfront.run_dir import RunDir
from warmfront.wishes import Wishes
from worker.loading import default_model_path


@contextmanager
def load(http: str) -> Iterator[list[str]]:
    """Three users who ask without a pause; what went wrong."""
    errors: list[str] = []
    is_over = threading.Event()

    def user(number: int) -> None:
        while not is_over.is_set():
            try:
                answer = ask(http, f"user {number} has a long question " * 20)
                assert answer.completion_tokens == 3
            except Failure as error:
                errors.append(error.message)
            time.sleep(0.2)

    users = [threading.Thread(target=user, args=(number,)) for number in range(3)]
    for one in users:
        one.start()
    try:
        yield errors
    finally:
        is_over.set()
        for one in users:
            one.join()


def ready(up: Up, count: int) -> list[str]:
    """The names of the replicas, once so many are READY and there is no other."""
    states = up.states()
    return sorted(states) if list(states.values()) == ["READY"] * count else []


def replaced(cli: Cli, up: Up, count: int) -> None:
    """Scaled up, rolled to other settings, rolled back from bad ones, scaled down: nobody notices."""
    with load(up.ready["http"]) as errors:
        assert cli("scale", f"{count}").out == f"{count} workers are READY\n"
        before = wait_until(lambda: ready(up, count), "the first workers")

        done = cli("rollout", "--set", "max-queue=300", "--batch", f"{count - 1}", "--surge", f"{count - 1}")
        assert (done.exit_code, "every worker is replaced" in done.out) == (0, True), done.err
        assert f"{count - 1} of {count} replaced" in done.err
        names = wait_until(lambda: ready(up, count), "new ones that are READY, and no other")
        assert names != before

        failed = cli("rollout", "--set", "engine=model", "--set", "model=/no/such/folder")
        assert failed.exit_code == 1, failed.err
        assert "/no/such/folder: there is no such file or folder; rolled back" in failed.err.splitlines()[-1]
        assert wait_until(lambda: ready(up, count), "the same") == names

        assert cli("scale", "1").out == "1 worker is READY\n"
        wait_until(lambda: ready(up, 1), "one that is READY, and no other")
    assert errors == []
    settings = yaml.safe_load((up.run_dir / "desired.yaml").read_text())["workers"]["settings"]
    assert (settings["max_queue"], settings["engine"]) == (300, "simulated")


def test_workers_are_scaled_and_replaced_under_load_and_nobody_notices(
    cli: Cli, temp_root: Path, tmp_path: Path
) -> None:
    with started(tmp_path, "--without-ray", "--replicas", "1", "--heartbeat", "300ms") as up:
        up.wait_ready()
        replaced(cli, up, 2)
        for arguments, words in (
            (("rollout", "--set", "block-size=32"), "makes another fleet"),
            (("rollout", "--set", "kv-blok=1"), "kv-blok is no flag of `warmfront worker`"),
            (("rollout", "--set", "kv-blocks=none"), "workers.settings.kv-blocks"),
            (("rollout", "--model", "/no/such"), "no such file"),
            (("scale", "0"), "not in the range"),
            (("scale", "1000"), "at most 64"),
            (("scale", "1", "--url", "http://127.0.0.1:1", "--ready-file", "x"), "not two of them"),
            (("scale", "1", "--url", "http://127.0.0.1:1"), "no cluster of yours here"),
        ):
            refused = cli(*arguments)
            assert (refused.exit_code, words in refused.err) == (2, True), refused.err
        # It loads a model for longer than that, unlike a simulated engine, which may be READY at the first look.
        late = cli("rollout", "--deadline", "100ms", "--set", "engine=model", "--model", f"{default_model_path()}")
        assert (late.exit_code, "0 of 1 were READY after 0.1 s; rolled back" in late.err) == (3, True), late.err
        assert up.stop() == 0
        up.assert_nothing_is_left()


@pytest.mark.slow
def test_on_ray_workers_are_scaled_and_replaced_under_load_and_nobody_notices(
    cli: Cli, temp_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a cluster of the user's beside this one is never joined
    with started(tmp_path, "--replicas", "2", "--heartbeat", "300ms") as up:
        up.wait_ready()
        replaced(cli, up, 3)
        assert cli("rollout", "--set", "kv-blocks=300").exit_code == 0, "with the fleet's longest context"
        other = cli("rollout", "--set", "kv-blocks=100")  # which does not fit
        assert (other.exit_code, "max_model_len is 1600 here and 3200 in the fleet" in other.err) == (1, True)
        assert up.stop() == 0
        up.assert_nothing_is_left()


def test_without_a_cluster_there_is_nothing_to_scale(cli: Cli, tmp_path: Path) -> None:
    assert "no cluster of yours runs here" in cli("scale", "2").err
    path = tmp_path / "desired.yaml"
    path.write_text("fleet: a\nredis: redis://127.0.0.1:1/0\nrouters: {count: 1}\nworkers: null\n")
    refused = cli("scale", "2", "--desired", str(path))
    assert (refused.exit_code, "its workers are not the controller's" in refused.err) == (2, True)
    path.write_text(
        "redis: redis://127.0.0.1:1/0\n"
        "workers: {replicas: 1, settings: {engine: simulated}, autoscale: {min: 1, max: 2}}\n"
    )
    assert "change its min and max" in cli("scale", "2", "--desired", str(path)).err
    late = cli("rollout", "--desired", str(path), "--no-wait")
    assert (late.exit_code, yaml.safe_load(path.read_text())["workers"]["rollout"]) == (0, {"attempt": 1})


def test_two_of_them_at_once_are_refused(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "desired.yaml"
    path.write_text("redis: redis://127.0.0.1:1/0\nworkers: {replicas: 1, settings: {engine: simulated}}\n")
    with Wishes(path, tmp_path).locked():
        refused = cli("scale", "2", "--desired", str(path))
    assert (refused.exit_code, "another scale or rollout" in refused.err) == (2, True)
    assert cli("scale", "2", "--desired", str(path), "--no-wait").exit_code == 0
    late = cli("scale", "3", "--desired", str(path), "--deadline", "300ms")  # no controller is there
    assert (late.exit_code, "not 3 READY workers after 300ms" in late.err) == (3, True)


class Told:
    """A controller's files, and what it tells of them."""

    def __init__(self, folder: Path) -> None:
        self.path, self._status = folder / "desired.yaml", folder / "status.json"
        self.path.write_text(
            "redis: redis://127.0.0.1:1/0\nworkers: {replicas: 2, settings: {engine: simulated, max-queue: 7}}\n"
        )

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = yaml.safe_load(self.path.read_text())["workers"]["settings"]
        return settings

    def tell(self, phase: str) -> None:
        (group,) = read_desired(self.path).groups
        told = {"revision": group.revision, "phase": phase, "why": "w2: no", "good": "x", "timed_out": False}
        self._status.write_text(json.dumps({"groups": {"worker": {**told, "count": 2, "new": 0, "ready": 2}}}))


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_a_rollout_that_was_left_alone_is_not_joined_by_the_next(cli: Cli, told: Told) -> None:
    where = ("--desired", str(told.path), "--no-wait")
    assert cli("rollout", *where, "--set", "max-queue=8").exit_code == 0
    for phase in ("", "rolling", "rolling back"):
        if phase:
            told.tell(phase)
        refused = cli("rollout", *where, "--set", "max-num-seqs=4")
        assert (refused.exit_code, "is under way" in refused.err) == (2, True)
    told.tell("rolled back")
    failed = read_desired(told.path).groups[0].revision
    assert cli("rollout", *where, "--set", "max-queue=8").exit_code == 0
    assert read_desired(told.path).groups[0].revision != failed, "the same again is another attempt"
    told.tell("rolled back")
    assert cli("rollout", *where, "--set", "max-num-seqs=4").exit_code == 0
    assert told.settings() == {"engine": "simulated", "max-queue": 7, "max_num_seqs": 4}
    told.tell("steady")
    assert cli("rollout", *where, "--set", "max-queue=9").exit_code == 0
    assert told.settings() == {"engine": "simulated", "max-queue": 9, "max_num_seqs": 4}


def test_a_rollout_that_another_command_has_begun_can_be_taken_back(cli: Cli, told: Told) -> None:
    where = ("--desired", str(told.path), "--no-wait")
    before = read_desired(told.path).groups[0].revision
    nothing = cli("rollout", *where, "--undo")
    assert (nothing.exit_code, "no rollout of this cluster is under way" in nothing.err) == (2, True)
    assert "another changes back" in nothing.err, "what has ended is not undone"
    assert cli("rollout", *where, "--set", "max-queue=8").exit_code == 0
    assert cli("scale", "3", "--desired", str(told.path), "--no-wait").exit_code == 0
    assert "takes no --model" in cli("rollout", *where, "--undo", "--set", "max-queue=9").err
    assert cli("rollout", *where, "--undo").exit_code == 0
    (group,) = read_desired(told.path).groups
    assert (group.revision, group.count) == (before, 3)


def test_what_a_rollout_is_refused_for_leaves_nothing_behind(cli: Cli, told: Told) -> None:
    where = ("--desired", str(told.path), "--no-wait")
    for change in ("host-kv-blocks=10000000000000", "kv-blocks=[a", "drain-deadline=[a", "log-level=2026-11-01"):
        refused = cli("rollout", *where, "--set", change)
        assert (refused.exit_code, change.split("=")[0] in refused.err) == (2, True), refused.err
    assert "under way" not in refused.err


def test_text_of_a_setting_stays_text(cli: Cli, told: Told) -> None:
    where = ("--desired", str(told.path), "--no-wait")
    changes = ("lora-dir=[/a, /b]", "prewarm-from-fleet=010", "fault=12:30", "kv-blocks=0100", "prewarm=no")
    assert cli("rollout", *where, *(word for change in changes for word in ("--set", change))).exit_code == 0
    expected = {
        "lora_dir": ["/a", "/b"],
        "prewarm_from_fleet": "010",
        "fault": "12:30",
        "kv_blocks": 100,
        "prewarm": False,
    }
    assert {name: told.settings()[name] for name in expected} == expected


def test_a_part_that_was_killed_is_told_as_such(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_text("all is well\n")
    assert end_of(-signal.SIGKILL, log) == "it was killed (SIGKILL, by somebody or for want of memory)"
    assert end_of(-signal.SIGSEGV, log) == "it was killed (SIGSEGV)"
    assert end_of(1, log) == "all is well"


def test_settings_keep_the_spelling_of_their_file_and_an_empty_value_takes_one_away() -> None:
    workers: dict[str, Any] = {"settings": {"kv-blocks": 100, "max_queue": 5, "block-size": 16}}
    change_settings(workers, None, ("kv_blocks=200", "max-queue=", "block-size=16", "prewarm=false"))
    assert workers["settings"] == {"kv-blocks": 200, "block-size": 16, "prewarm": False}
    with pytest.raises(WrongUse, match="another fleet"):
        change_settings(workers, None, ("mode=deterministic",))


def test_a_cluster_is_chosen_by_the_environment_where_no_option_names_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFRONT_URL", "http://127.0.0.1:1")
    for command in (("scale", "2"), ("rollout",)):
        assert "http://127.0.0.1:1: no cluster of yours here has that address" in cli(*command).err
    path = tmp_path / "desired.yaml"
    path.write_text("redis: redis://127.0.0.1:1/0\nworkers: {replicas: 1, settings: {engine: simulated}}\n")
    assert cli("scale", "2", "--desired", str(path), "--no-wait").exit_code == 0


def test_a_command_that_changes_a_cluster_which_nobody_named_says_which_one_first(
    cli: Cli, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir.create()
    run_dir.cluster = {"http": router.url}
    run_dir.save()
    for command in (("scale", "2"), ("rollout",), ("drain", "w0", "--no-wait"), ("reset",), ("lora", "unload", "a")):
        first, *_ = cli(*command).err.splitlines()
        assert first.startswith(f"warmfront: no cluster is named: this is about {router.url} ("), command
        assert "no cluster is named" not in cli(*command, "--url", router.url).err
    for command in (("status",), ("lora", "list")):
        assert "no cluster is named" not in cli(*command).err
    monkeypatch.setenv("WARMFRONT_URL", "http://127.0.0.1:1")
    for command in (("scale", "2"), ("rollout",), ("drain", "w0"), ("reset",), ("down",)):
        told = cli(*command)
        assert told.exit_code == 2
        assert "http://127.0.0.1:1" in told.err
        assert "no cluster is named" not in told.err


def test_of_several_clusters_every_command_asks_for_one_in_the_same_words(cli: Cli, temp_root: Path) -> None:
    for port in (1, 2):
        run_dir = RunDir.create()
        run_dir.cluster = {"http": f"http://127.0.0.1:{port}"}
        run_dir.save()
    for command in (("scale", "2"), ("rollout",), ("status",)):
        refused = cli(*command)
        assert refused.exit_code == 2
        assert "choose one with --url or WARMFRONT_URL: http://127.0.0.1:1, http://127.0.0.1:2" in refused.err
