"""Installing, upgrading and going back, by Helm itself against an API server that refuses what Kubernetes refuses."""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.kubernetes_api import Cluster, RefusedError, serve
from tests.helm.tools import CHART, Helm, Objects

FIRST = Path(__file__).resolve().parents[1] / "golden" / "helm" / "first-version.yaml"
PODS = ("Deployment", "StatefulSet")
MODES = ["ray.mode=none", "ray.mode=static", "ray.mode=static,worker.placement=ray"]


class Place:
    """A namespace to which Helm installs."""

    def __init__(self, helm: Helm, cluster: Cluster, url: str) -> None:
        self._helm, self._url = helm, url
        self.cluster = cluster

    def helm(self, *args: str) -> str:
        """What Helm prints. A failure is an ``AssertionError`` with its words."""
        made = self._helm.run(*args, "--kube-apiserver", self._url)
        assert made.returncode == 0, made.stderr
        return made.stdout

    def install(self, *values: str) -> str:
        return self.helm("upgrade", "--install", "wf", str(CHART), "--disable-openapi-validation", *_set(values))

    def objects(self) -> dict[tuple[str, str], dict[str, Any]]:
        """What matters of each object of the chart."""
        return {
            key: {name: value for name, value in item.items() if name != "metadata"}
            for key, item in copy.deepcopy(self.cluster.objects).items()
            if not key[1].startswith("sh.helm")
        }


def _set(values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.fixture
def place(helm: Helm) -> Iterator[Place]:
    cluster = Cluster()
    with serve(cluster) as url:
        yield Place(helm, cluster, url)


@pytest.mark.parametrize("mode", [MODES[0], MODES[-1]])
def test_an_upgrade_that_changes_nothing_changes_nothing(place: Place, mode: str) -> None:
    place.install(mode, "cache.hashAlgorithm=xxhash")
    before = place.objects()
    assert len(before["Secret", "wf-warmfront"]["data"]) == (3 if mode == "ray.mode=none" else 4)
    place.install(mode, "cache.hashAlgorithm=xxhash")
    assert place.objects() == before  # the generated secrets with the rest


@pytest.mark.parametrize("mode", MODES)
def test_every_object_of_the_first_version_can_be_upgraded(helm: Helm, mode: str) -> None:
    cluster = Cluster()
    for item in yaml.safe_load_all(FIRST.read_text(encoding="utf-8")):
        cluster.put(item)
    for item in helm.template("--set", mode):
        cluster.put(item)


def test_no_object_of_the_first_version_is_lost(helm: Helm, defaults: Objects) -> None:
    first = [(item["kind"], item["metadata"]["name"]) for item in yaml.safe_load_all(FIRST.read_text(encoding="utf-8"))]
    assert set(first) <= {(item["kind"], item["metadata"]["name"]) for item in defaults}


def test_a_changed_selector_would_be_noticed(defaults: Objects) -> None:
    cluster = Cluster()
    deployment = copy.deepcopy(next(item for item in defaults if item["kind"] == "Deployment"))
    cluster.put(deployment)
    deployment["spec"]["selector"]["matchLabels"]["version"] = "2"
    with pytest.raises(RefusedError, match=r"spec\.selector"):
        cluster.put(deployment)


def test_a_release_goes_from_processes_to_ray_and_back(place: Place) -> None:
    place.install("ray.mode=none")
    before = place.objects()
    place.install("ray.mode=static")
    assert ("StatefulSet", "wf-warmfront-head") in place.objects()
    place.helm("rollback", "wf", "1")
    after = place.objects()
    after["Secret", "wf-warmfront"]["data"].pop("ray-token", None)
    assert after == before


def test_a_change_of_contract_names_both_fleets_and_what_it_costs(place: Place) -> None:
    def fleet() -> str:
        pod = place.cluster.get("Deployment", "wf-warmfront-worker")["spec"]["template"]
        name: str = pod["metadata"]["annotations"]["warmfront/fleet"]
        return name

    assert "FLEET CHANGES" not in place.install()
    old = fleet()
    assert "FLEET CHANGES" not in place.install("worker.flags.kv-blocks=9")
    notes = place.install("cache.blockSize=32", f"worker.flags.prewarm-from-fleet={old}")
    assert f"FLEET CHANGES from {old} to {fleet()}" in " ".join(notes.split())
    worker = place.cluster.get("Deployment", "wf-warmfront-worker")["spec"]["template"]["spec"]["containers"][0]
    args = worker["args"]
    assert args[args.index("--prewarm-from-fleet") + 1] == old
    assert args[args.index("--fleet") + 1] == fleet() != old


OWN_SECRETS = ["workerToken.existingSecret=mine", "workerToken.key=token", "redis.bundled.existingSecret=mine"]


def test_a_changed_secret_of_the_user_rolls_the_pods_that_read_it_once(place: Place) -> None:
    def put(**keys: bytes) -> None:
        data = {key.replace("_", "-"): base64.b64encode(value).decode() for key, value in keys.items()}
        place.cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine"}, "data": data})

    def pods() -> dict[str, Any]:
        place.install(*OWN_SECRETS)
        found = {key[1]: item["spec"]["template"] for key, item in place.objects().items() if key[0] in PODS}
        return {name.removeprefix("wf-warmfront-"): template for name, template in found.items()}

    put(token=b"first token", redis_password=b"one")
    before = pods()
    assert "checksum/secrets" in before["worker"]["metadata"]["annotations"]
    put(token=b"first token", redis_password=b"one", other=b"of no pod")
    assert pods() == before
    put(token=b"second token", redis_password=b"one")
    after = pods()
    assert {name for name in after if after[name] != before[name]} == {"router", "worker"}
    put(token=b"second token", redis_password=b"two")
    again = pods()
    assert {name for name in again if again[name] != after[name]} == {"router", "worker", "head", "valkey"}


def test_two_releases_live_in_one_namespace(place: Place) -> None:
    for release in ("a", "b"):
        place.helm("install", release, str(CHART), "--disable-openapi-validation", "--set", "ray.mode=static")
    names = {name for kind, name in place.objects() if kind == "StatefulSet"}
    assert names == {"a-warmfront-head", "b-warmfront-head"}
