"""The file that says what should run: every key and value is known or refused by its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.reconcile import Rollout
from tests.warmfront.conftest import Cli
from warmfront.desired import number_of, own_ports, parse, read_desired, write_desired

ROOT = Path(__file__).resolve().parents[2]


def content(**changes: Any) -> dict[str, Any]:
    return {
        "fleet": "chat",
        "redis": "redis://127.0.0.1:6379/0",
        "worker-token-file": "/run/token",
        "routers": {"count": 2, "resources": {"warmfront_router": 1}, "settings": {"http-port": 0, "grpc-port": 0}},
        "workers": {"replicas": 3, "num-gpus": 0.5, "settings": {"engine": "simulated", "drain-deadline": "5s"}},
        **changes,
    }


def test_a_whole_file_is_read() -> None:
    desired = parse(content())
    routers, workers = desired.groups
    assert (desired.fleet, routers.role, routers.count, workers.role, workers.count) == (
        "chat",
        "router",
        2,
        "worker",
        3,
    )
    assert routers.placement == {"num_cpus": 0, "num_gpus": 0, "resources": {"warmfront_router": 1}}
    assert (workers.placement["num_gpus"], workers.drain_s) == (0.5, 5.0)
    assert workers.settings == {
        "engine": "simulated",
        "drain_deadline": "5s",
        "fleet": "chat",
        "redis": "redis://127.0.0.1:6379/0",
        "worker_token_file": "/run/token",
    }
    assert (routers.rollout.surge, workers.rollout) == (0, Rollout())


def test_the_example_of_the_documents_is_read() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8").split("### The file of the desired state")[1]
    desired = parse(yaml.safe_load(text.split("```yaml")[1].split("```")[0]))
    assert desired.autoscale is not None
    assert (desired.autoscale.max, desired.autoscale.down_window_s) == (8, 300)
    assert desired.groups[1].rollout.when_below_s == 0.5


@pytest.mark.parametrize("value", ["2026-11-01", "2026-11-01 10:00:00", "12:30", "1e3", "0x10", "on", "~"])
def test_words_that_yaml_takes_for_something_else_are_settings_all_the_same(value: str) -> None:
    settings = yaml.safe_load(f"served-model-name: {value}\n")
    group = parse(worker(settings={"engine": "simulated", **settings})).groups[1]
    assert json.dumps([group.revision, dict(group.settings)]), "a controller writes them down"


def test_a_date_is_the_text_that_it_was(tmp_path: Path) -> None:
    path = tmp_path / "desired.yaml"
    path.write_text(yaml.safe_dump(content()) + "suffix: x\n")
    path.write_text(path.read_text().replace("engine: simulated", "served-model-name: 2026-11-01"))
    assert read_desired(path).groups[1].settings["served_model_name"] == "2026-11-01"


@pytest.mark.parametrize("text", ["kv-blocks: 2026-13-45", "kv-blocks: !!int ''", "a: &a [*a]", "[" * 3000, "\x00"])
def test_yaml_that_is_none_is_refused_as_such(tmp_path: Path, text: str) -> None:
    path = tmp_path / "desired.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"desired\.yaml"):
        read_desired(path)


def test_how_long_a_start_may_take_is_no_part_of_the_settings() -> None:
    routers, workers = parse(content()).groups
    assert (routers.start_s, workers.start_s, workers.attempt) == (120, 600, 0)
    values = content()["workers"]
    patient = parse(content(workers={**values, "start-deadline": "20m", "attempt": 3})).groups[1]
    assert (patient.start_s, patient.attempt, patient.revision) == (1200, 3, workers.revision)


def test_a_router_has_its_notice_and_then_its_answers_time_to_drain() -> None:
    settings = {"http-port": 0, "grpc-port": 0, "drain-deadline": "20s", "drain-notice": "6s"}
    assert parse(content(routers={"count": 1, "settings": settings})).groups[0].drain_s == 26


def test_a_role_may_be_somebody_else_s() -> None:
    assert [group.role for group in parse(content(workers=None)).groups] == ["router"]
    assert [group.role for group in parse(content(routers=None)).groups] == ["worker"]


def worker(**values: Any) -> dict[str, Any]:
    return content(workers={"replicas": 1, **values})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (content(router={}), r"router: no such key; is routers meant\?"),
        (content(routers={"settings": {}}), "routers.count: is missing"),
        (content(routers={"count": -1}), "routers.count: -1 is no whole number of 0 or more"),
        (content(routers={"count": True}), "routers.count"),
        (content(routers=[]), "routers: expected lines"),
        (content(redis=None), "redis: is missing, here and in WARMFRONT_REDIS"),
        (content(redis="http://x"), "scheme 'http'"),
        (worker(replica=1), r"workers.replica: no such key; is replicas meant\?"),
        (worker(num_gpus="two"), "workers.num-gpus: 'two' is no number"),
        (worker(resources=["a"]), "workers.resources"),
        (worker(settings={"kv-blok": 1}), r"workers.settings.kv-blok: no such key; is kv-blocks meant\?"),
        (worker(settings={"kv-blocks": 0}), "workers.settings.kv-blocks: 0 is not in the range"),
        (worker(settings={"replica-id": "x"}), "workers.settings.replica-id: each worker is given its own"),
        (worker(settings={"fleet": "x"}), "workers.settings.fleet: stands at the top"),
        (worker(settings={"worker-token-file": "x"}), "workers.settings.worker-token-file: stands at the top"),
        (worker(settings={"http-port": 1}), "workers.settings.http-port: no such key"),
        (worker(settings={"model": ["a"]}), "workers.settings.model: takes one value"),
        (worker(settings={"drain-deadline": 5}), "workers.settings.drain-deadline: '?5'? is no duration"),
        (worker(settings={"heartbeat": "5s"}), "workers.settings: --heartbeat 5s"),
        (worker(settings={"kv-blocks": 10**12}), "workers.settings.kv-blocks: .* is not in the range"),
        (worker(settings={"host-kv-blocks": 10**12}), "workers.settings.host-kv-blocks: .* is not in the range"),
        (worker(settings={"gpu-memory-utilization": float("nan")}), "gpu-memory-utilization: nan is no number"),
        (worker(settings={"model": b"a"}), "workers.settings.model: takes one value"),
        (worker(num_gpus=float("inf")), "workers.num-gpus: inf is no number"),
        (worker(**{"start-deadline": 5}), "workers.start-deadline: '?5'? is no duration"),
        (worker(attempt=-1), "workers.attempt"),
        (worker(rollout={"surge": -1}), "workers.rollout.surge"),
        (worker(rollout={"batches": 2}), r"workers.rollout.batches: no such key; is batch meant\?"),
        (worker(rollout={"when-below": "much"}), "workers.rollout.when-below"),
        (worker(autoscale={"min": 1}), "workers.autoscale.max: is missing"),
        (worker(autoscale={"min": 3, "max": 2}), "min 3 and max 2"),
        (worker(autoscale={"min": 1, "max": 2, "target": 1}), r"autoscale.target: no such key; is target-wait meant\?"),
        (None, "the file: expected lines"),
    ],
)
def test_what_is_wrong_is_refused_by_its_path(wrong: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse(wrong)


def test_a_redis_url_may_come_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFRONT_REDIS", "redis://:secret@host:6379/0")
    desired = parse(content(redis=None))
    assert desired.redis_url.endswith("host:6379/0")
    assert all("redis" not in group.settings for group in desired.groups), "each part reads it on its own node"
    assert "secret" not in repr(desired)


def test_a_file_that_would_be_refused_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "desired.yaml"
    write_desired(path, content())
    assert (path.stat().st_mode & 0o777, read_desired(path).fleet) == (0o600, "chat")
    with pytest.raises(ValueError, match=r"workers\.replicas"):
        write_desired(path, content(workers={}))
    assert read_desired(path).groups[1].count == 3
    path.write_text("fleet: [")
    with pytest.raises(ValueError, match=r"desired\.yaml"):
        read_desired(path)


def test_parts_of_one_machine_have_metrics_ports_of_their_own() -> None:
    assert own_ports("w3-abcde", {"metrics_port": 9100}) == {"metrics_port": 9103}
    assert own_ports("router-1", {"metrics_port": 9100}) == {}, "one per node"
    assert own_ports("router-1", {"metrics_port": 9100, "reuse_port": True}) == {"metrics_port": 9101}
    assert own_ports("w3", {}) == {}
    assert number_of("w12-7b") == 12


def test_the_controller_refuses_a_bad_file_and_a_cluster_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "desired.yaml"
    path.write_text(yaml.safe_dump(content(workers={})))
    refused = cli("controller", "--desired", str(path), "--ray-address", "local")
    assert (refused.exit_code, "workers.replicas: is missing" in refused.err) == (2, True)
    path.write_text(yaml.safe_dump(content()))
    assert cli("controller", "--desired", str(path)).exit_code == 2, "no cluster is joined by guess"
    refused = cli("controller", "--desired", str(path), "--ray-address", "somewhere")
    assert (refused.exit_code, "HOST:PORT" in refused.err) == (2, True)
    refused = cli("controller", "--desired", str(path), "--ray-address", "local", "--state-dir", "/proc/x")
    assert (refused.exit_code, "--state-dir" in refused.err) == (2, True)


def test_routers_may_be_counted_by_their_nodes() -> None:
    routers = parse(content(routers={"count": "each-node", "resources": {"warmfront_router": 1}})).groups[0]
    assert (routers.each_node, routers.count) == (True, 0)
    with pytest.raises(ValueError, match=r"routers\.resources: is missing"):
        parse(content(routers={"count": "each-node"}))
    with pytest.raises(ValueError, match=r"workers\.replicas"):
        parse(content(workers={"replicas": "each-node", "resources": {"x": 1}}))
