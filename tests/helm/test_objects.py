"""Every object that the chart makes is one that Kubernetes, or the operator it is for, would take."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.helm.tools import CHART, SCENARIOS, Helm, Objects, helm_3, helm_4, one, pod_templates

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "helm"
BY_HAND = {"HTTPRoute", "GRPCRoute", "Certificate"}  # no schema at hand: compared with golden files instead
CRDS = json.loads(gzip.decompress((GOLDEN / "crd-schemas.json.gz").read_bytes()))
VERSIONS = [f"1.{minor}" for minor in range(28, 38)]


def check(item: dict[str, Any], versions: list[str]) -> None:
    name = f"{item['kind']}.{item['apiVersion'].rpartition('/')[2]}"
    if name in CRDS:
        # Not jsonschema.validate: Go's regular expressions in these schemas are none of Python's.
        jsonschema.Draft202012Validator(CRDS[name]).validate(item)
    elif item["kind"] not in BY_HAND:
        for version in versions:
            kubernetes_validate.validate(item, version, strict=True)


def unique(scenarios: dict[str, Objects]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in {json.dumps(item, sort_keys=True) for o in scenarios.values() for item in o}]


def test_every_object_of_every_scenario_passes_its_schema(scenarios: dict[str, Objects]) -> None:
    for item in unique(scenarios):
        check(item, [VERSIONS[0], VERSIONS[-1]])


@pytest.mark.slow
def test_every_object_passes_the_schemas_of_all_supported_versions(scenarios: dict[str, Objects]) -> None:
    for item in unique(scenarios):
        check(item, VERSIONS)


def test_the_schemas_are_strict(defaults: Objects) -> None:
    broken = json.loads(json.dumps(one(defaults, "Deployment", "-router")))
    broken["spec"]["template"]["spec"]["containers"][0]["argss"] = []
    with pytest.raises(jsonschema.ValidationError):
        check(broken, ["1.37"])


def test_scenarios_cover_every_kind_the_chart_can_make(scenarios: dict[str, Objects]) -> None:
    rendered = {item["kind"] for objects in scenarios.values() for item in objects}
    written = {
        line.split()[1]
        for path in (CHART / "templates").rglob("*.yaml")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("kind: ")
    }
    assert written <= rendered


def test_routes_are_those_written_by_hand(scenarios: dict[str, Objects]) -> None:
    for golden in yaml.safe_load_all((GOLDEN / "routes.yaml").read_text(encoding="utf-8")):
        route = one(scenarios["production"], golden["kind"])
        assert {key: route[key] for key in golden} == golden


def test_certificates_are_those_written_by_hand(helm: Helm) -> None:
    issuer = ["tls.certManager.issuerRef.name=inside", "tls.certManager.publicDnsNames={llm.example.com}"]
    objects = helm.template("--set", ",".join(["tls.public.enabled=true,tls.workers.enabled=true", *issuer]))
    for golden in yaml.safe_load_all((GOLDEN / "certificates.yaml").read_text(encoding="utf-8")):
        certificate = one(objects, "Certificate", f"-{golden['spec']['secretName'].removeprefix('wf-warmfront-')}")
        assert {key: certificate[key] for key in golden} == golden


def test_selectors_meet_pods(scenarios: dict[str, Objects]) -> None:
    for objects in scenarios.values():
        pods = [made["metadata"]["labels"] for name, made in pod_templates(objects) if not name.endswith("-test")]
        for item in objects:
            if item["kind"] in ("Service", "PodDisruptionBudget", "Deployment", "StatefulSet"):
                selector = item["spec"]["selector"]
                wanted = selector.get("matchLabels", selector).items()
                assert sum(wanted <= labels.items() for labels in pods) == 1, item["metadata"]["name"]


def test_two_releases_in_one_namespace_share_no_name_selector_or_fleet(helm: Helm) -> None:
    names, fleets, instances = [], [], set()
    for release in ("a", "b"):
        objects = helm.template(release=release)
        names += [(item["kind"], item["metadata"]["name"]) for item in objects]
        pod = one(objects, "Deployment", "-worker")["spec"]["template"]["metadata"]
        fleets.append(pod["annotations"]["warmfront/fleet"])
        instances.add(pod["labels"]["app.kubernetes.io/instance"])
    assert len(set(names)) == len(names)
    assert len(set(fleets)) == 2
    assert len(instances) == 2


def test_lint_finds_nothing(helm: Helm) -> None:
    for path in SCENARIOS:
        made = helm.run("lint", "--strict", str(CHART), "--values", str(path))
        assert made.returncode == 0, made.stdout + made.stderr


def without_random(objects: Objects) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] != "Secret"]


@pytest.mark.slow
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_helm_3_lints_and_makes_the_same_objects(path: Path) -> None:
    old = helm_3()
    made = old.run("lint", "--strict", str(CHART), "--values", str(path))
    assert made.returncode == 0, made.stdout + made.stderr
    key = lambda item: (item["kind"], item["metadata"]["name"])  # noqa: E731
    assert sorted(without_random(old.template(values=path)), key=key) == sorted(
        without_random(helm_4().template(values=path)), key=key
    )


def test_the_package_holds_no_scenarios(helm: Helm, tmp_path: Path) -> None:
    made = helm.run("package", str(CHART), "--destination", str(tmp_path))
    assert made.returncode == 0, made.stderr
    with tarfile.open(next(tmp_path.glob("warmfront-*.tgz"))) as tar:
        names = tar.getnames()
    assert "warmfront/values.schema.json" in names
    assert not [name for name in names if "/ci/" in name]
