"""What values do: what both sides share, what is refused and how, and who may do what by default."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.helm.tools import (
    CHART,
    ROOT,
    SCENARIOS,
    Helm,
    Objects,
    desired,
    helm_3,
    helm_4,
    one,
    pod,
    pod_specs,
    pod_templates,
    settings,
)
from warmfront.flags import flags_of

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SYNC = runpy.run_path(str(ROOT / "tools" / "helm-sync"))
SHARED = (
    "--fleet",
    "--prefix-caching-hash-algo",
    "--block-size",
    "--worker-token-file",
    "--prefix-caching-hash-seed-file",
)


def container(objects: Objects, component: str) -> dict[str, Any]:
    found: dict[str, Any] = pod(objects, component)["spec"]["containers"][0]
    return found


def fleet(helm: Helm, *args: str, **more: str) -> str:
    objects = helm.template(*args, **more)
    router, worker = settings(objects, "router")["--fleet"], settings(objects, "worker")["--fleet"]
    assert router == worker
    return router


# One contract


def test_both_sides_get_the_same_contract(scenarios: dict[str, Objects]) -> None:
    for objects in scenarios.values():
        router, worker = settings(objects, "router"), settings(objects, "worker")
        assert {flag: router.get(flag) for flag in SHARED} == {flag: worker.get(flag) for flag in SHARED}
        redis = [
            item.get("value") or item["valueFrom"]["secretKeyRef"]["name"]  # each may have a user of its own
            for side in ("router", "worker")
            for item in container(objects, side)["env"]
            if item["name"] == "WARMFRONT_REDIS"
        ]
        assert len(redis) == 2
        assert len(set(redis)) == 1


@pytest.mark.parametrize(
    "change",
    [
        "model.path=/models/a",
        "model.servedName=a",
        "model.revision=b",
        "cache.blockSize=32",
        "cache.hashAlgorithm=sha256",
        "cache.hashAlgorithm=xxhash",
        "worker.flags.dtype=bfloat16",
        "worker.flags.mode=deterministic",
        "worker.flags.max-model-len=4096",
    ],
)
def test_a_change_of_contract_is_a_new_fleet(helm: Helm, change: str) -> None:
    assert fleet(helm, "--set", change) != fleet(helm)


@pytest.mark.parametrize("same", ["worker.replicas=7", "worker.flags.kv-blocks=100", "router.flags.policy=random"])
def test_what_is_no_contract_keeps_the_fleet(helm: Helm, same: str) -> None:
    assert fleet(helm, "--set", same) == fleet(helm)


def test_namespaces_on_one_redis_have_fleets_of_their_own(helm: Helm) -> None:
    assert fleet(helm, namespace="a") != fleet(helm, namespace="b")


def test_the_longest_names_still_make_a_fleet_that_the_program_takes(helm: Helm) -> None:
    name = fleet(helm, release="r" * 53, namespace="n" * 63)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name)


# Flags are the program's


@pytest.mark.parametrize("component", ["router", "worker"])
def test_what_the_chart_sets_itself_is_none_of_the_user_s_flags(scenarios: dict[str, Objects], component: str) -> None:
    mine = SCHEMA["properties"][component]["properties"]["flags"]["properties"]
    everything = {flag.name for flag in flags_of(component)}
    assert set(mine) | SYNC["OWNED"][component] == everything
    for args in ([], ["--set", "model.path=/m,model.servedName=m"], ["--set", "router.trustTenantHeader=true"]):
        rendered = {flag.removeprefix("--") for flag in settings(helm_4().template(*args), component)}
        assert rendered <= SYNC["OWNED"][component]


def test_the_schema_has_the_program_s_flags() -> None:
    text = (CHART / "values.schema.json").read_text(encoding="utf-8")
    assert text == SYNC["schema"](text), "run tools/helm-sync"


def test_false_is_spelled_as_the_program_knows_it(helm: Helm) -> None:
    for component in ("router", "worker"):
        known = SCHEMA["properties"][component]["properties"]["flags"]["properties"]
        switches = [flag for flag in flags_of(component) if flag.name in known and flag.type in (bool, click.BOOL)]
        off = [item for flag in switches for item in ("--set", f"{component}.flags.{flag.name}=false")]
        args = container(helm.template("--set", "ray.mode=none", *off), component)["args"]
        for flag in switches:
            assert (f"--no-{flag.name}" in args) is (flag.type is bool), flag.name
            assert f"--{flag.name}" not in args


def test_numbers_keep_their_digits(helm: Helm) -> None:
    got = settings(
        helm.template("--set", "worker.flags.cpu-kv-bytes=34359738368,worker.flags.gpu-memory-utilization=0.92"),
        "worker",
    )
    assert got["--cpu-kv-bytes"] == "34359738368"
    assert got["--gpu-memory-utilization"] == "0.92"


def test_a_flag_with_a_list_is_given_once_for_each_of_it(helm: Helm) -> None:
    objects = helm.template("--set", "worker.flags.lora-dir={/a,/b},worker.flags.lora={french=/a/f}")
    args = container(objects, "worker")["args"]
    given = [pair for pair in pairwise(args) if pair[0].startswith("--lora")]
    assert given == [("--lora", "french=/a/f"), ("--lora-dir", "/a"), ("--lora-dir", "/b")]


def test_a_flag_with_a_list_stays_one_on_ray(helm: Helm) -> None:
    lists = ["worker.flags.lora-dir={/a,/b}", "worker.flags.lora={french=/a/f}"]
    given = desired(helm.template(*set_all([*RAY_WORKERS, *lists])))["workers"]["settings"]
    assert (given["lora"], given["lora-dir"]) == (["french=/a/f"], ["/a", "/b"])


# Refusals name the value


RAY_WORKERS = ["ray.mode=static", "worker.placement=ray"]
ON_RAY_SCALED = [*RAY_WORKERS, "worker.ray.autoscale.enabled=true"]
REFUSED: list[tuple[str, list[str]]] = [
    ("ray.mode", ["ray.mode=serve"]),
    ("worker.placement", ["ray.mode=none", "worker.placement=ray"]),
    ("worker.keda.enabled", [*RAY_WORKERS, "worker.keda.enabled=true", "worker.keda.serverAddress=http://p"]),
    ("worker.replicas", [*RAY_WORKERS, "worker.replicas=3"]),
    ("worker.ray.surge", [*RAY_WORKERS, "worker.ray.surge=1"]),
    ("worker.ray.autoscale", ["worker.ray.autoscale.enabled=true"]),
    ("worker.ray.whenBelow", ["worker.ray.whenBelow=500ms"]),
    ("worker.ray.whenBelow", [*RAY_WORKERS, "worker.ray.whenBelow=500"]),
    ("worker.ray.autoscale.maxReplicas", [*ON_RAY_SCALED, "worker.ray.autoscale.maxReplicas=3"]),
    ("worker.ray.autoscale.minReplicas", [*ON_RAY_SCALED, "worker.ray.autoscale.minReplicas=3"]),
    ("worker.ports.metrics", [*RAY_WORKERS, "worker.gpu.count=4", "worker.ports.metrics=6377"]),
    ("worker.extraArgs", [*RAY_WORKERS, "worker.extraArgs={--log-json}"]),
    ("router.extraArgs", ["ray.mode=static", "router.extraArgs={--log-json}"]),
    ("router.autoscaling.enabled", ["ray.mode=kuberay", "router.autoscaling.enabled=true"]),
    ("router.podDisruptionBudget", ["ray.mode=kuberay", "router.podDisruptionBudget.maxUnavailable=50%"]),
    ("ray.ports.gcs", ["ray.mode=static", "ray.ports.gcs=8000"]),
    ("ray.ports.others", ["ray.mode=static", "ray.ports.others=7998"]),
    ("ray.ports.workers", ["ray.mode=static", "ray.ports.workers=50000"]),
    ("redis.external", ["redis.external.url=redis+other://s:6379"]),
    ("redis.external.url", ["redis.external.url=redis://:secret@s:6379/0"]),
    ("redis.external.url", ["redis.external.url=redis://s", "redis.external.existingSecret=s"]),
    ("redis.external.workerKey", ["redis.external.url=redis://s", "redis.external.workerKey=worker"]),
    ("redis.external.caSecret", ["redis.external.caSecret.name=ca"]),
    ("cache.blockSize", ["cache.blockSize=4"]),
    ("cache.hashAlgorithm", ["cache.hashAlgorithm=md5"]),
    ("cache.hashSeed", ["cache.hashSeed.existingSecret=s"]),
    ("cache.fleet", ["cache.fleet=a b"]),
    ("model.path", ["model.volume.existingClaim=c"]),
    ("model.path", ["model.volume.existingClaim=c", "model.path=/models-of-mine/x"]),
    ("model.volume", ["model.path=/models/a", "model.volume.existingClaim=c", "model.volume.source.nfs.server=s"]),
    ("model.path", ["model.path=models/a"]),
    ("fullnameOverride", ["fullnameOverride=UPPER_case"]),
    ("fullnameOverride", ["nameOverride=a.b"]),
    ("router.resources.requests.memory", ["router.resources.requests.memory=lots"]),
    ("worker.resources.limits.memory", ["worker.resources.limits.memory=16GiB"]),
    ("worker.resources", ["worker.resources.request.memory=1Gi"]),
    ("ray.head.controllerResources.limits.cpu", ["ray.head.controllerResources.limits.cpu=-1"]),
    ("router.podDisruptionBudget.maxUnavailable", ["router.podDisruptionBudget.maxUnavailable=0%"]),
    ("worker.podDisruptionBudget.maxUnavailable", ["worker.podDisruptionBudget.maxUnavailable=0"]),
    ("router.replicas", ["router.replicas=1"]),
    ("router.minReadyReplicas", ["router.minReadyReplicas=3"]),
    ("router.flags", ["router.flags.drain-notice=1s"]),
    ("router.trustTenantHeader", ["router.trustTenantHeader=true", "networkPolicy.enabled=false"]),
    ("router.terminationGracePeriodSeconds", ["router.terminationGracePeriodSeconds=40"]),
    ("worker.terminationGracePeriodSeconds", ["worker.terminationGracePeriodSeconds=60"]),
    ("router.ports", ["router.ports.grpc=8000"]),
    ("worker.ports", ["worker.ports.grpc=9091"]),
    ("router.autoscaling", ["router.autoscaling.enabled=true", "router.autoscaling.minReplicas=20"]),
    (
        "router.autoscaling",
        ["router.autoscaling.enabled=true", "router.autoscaling.targetCPUUtilizationPercentage=null"],
    ),
    ("worker.keda.serverAddress", ["worker.keda.enabled=true"]),
    ("worker.rollingUpdate", ["worker.rollingUpdate.maxSurge=0"]),
    ("worker.startupDeadlineSeconds", ["worker.startupDeadlineSeconds=50"]),
    ("worker.startupDeadlineSeconds", ["worker.flags.prewarm-deadline=15m"]),
    ("worker.gpu.count", ["worker.gpu.count=2"]),
    ("worker.gpu.count", ["worker.flags.device=cpu"]),
    ("worker.flags", ["worker.flags.listen=0.0.0.0"]),
    ("worker.flags", ["worker.flags.kv-block=3"]),
    ("router.flags.policy", ["router.flags.policy=best"]),
    ("router.image.digest", ["router.image.digest=latest"]),
    ("ingress.hosts", ["ingress.enabled=true"]),
    ("gateway.httpRoute.timeouts.request", ["gateway.httpRoute.timeouts.request=1.5s"]),
    ("gateway.parentRefs", ["gateway.grpcRoute.enabled=true"]),
    ("serviceAccount.name", ["serviceAccount.create=false"]),
    ("tls.public.existingSecret", ["tls.public.enabled=true"]),
    ("tls.public.clientCaSecret", ["tls.public.clientCaSecret=ca"]),
    ("tls.workers", ["tls.workers.enabled=true", "tls.workers.existingSecret=s"]),
    ("replicaCount", ["replicaCount=3"]),
]


def set_all(args: list[str]) -> list[str]:
    return [item for arg in args for item in ("--set", arg)]


def named(name: str, said: str) -> bool:
    """Whether Helm's words name the value: as a path, a JSON pointer, or an unknown name."""
    return name in said or "/" + name.replace(".", "/") in said


@pytest.mark.parametrize(("name", "args"), REFUSED, ids=[",".join(args) for _, args in REFUSED])
def test_a_wrong_value_is_refused_by_name(helm: Helm, name: str, args: list[str]) -> None:
    said = helm.refusal(*set_all(args))
    assert named(name, said), said


@pytest.mark.slow
@pytest.mark.parametrize(("name", "args"), REFUSED, ids=[",".join(args) for _, args in REFUSED])
def test_helm_3_refuses_it_too(name: str, args: list[str]) -> None:
    said = helm_3().refusal(*set_all(args))
    assert named(name, said), said


def closed(schema: dict[str, Any], path: str = "") -> list[str]:
    """Paths of objects in the schema that take any key without saying of which kind."""
    if schema.get("type") != "object":
        return []
    if "properties" not in schema:
        return [] if "additionalProperties" in schema else [path]
    found = [] if schema.get("additionalProperties") is False else [path]
    for name, inner in schema["properties"].items():
        found += closed(inner, f"{path}.{name}".lstrip("."))
    return found


def test_only_kubernetes_own_objects_are_open_in_the_schema() -> None:
    probes = {"livenessProbe", "readinessProbe", "startupProbe"}
    own = {
        "affinity",
        "behavior",
        "global",
        "lifecycle",
        "podSecurityContext",
        "securityContext",
        "source",
    }
    assert {path.rpartition(".")[2] for path in closed(SCHEMA)} == own | probes


def paths(schema: dict[str, Any], values: Any, path: str = "") -> tuple[set[str], set[str]]:
    """Dotted names in the schema and in the values, as deep as the schema names keys."""
    if "properties" not in schema or path.endswith(".flags") or not isinstance(values, dict):
        return {path}, {path}
    named, given = set(schema["properties"]) - {"global"}, set(values)
    in_schema, in_values = {f"{path}.{key}" for key in named}, {f"{path}.{key}" for key in given}
    for key in named & given:
        deeper = paths(schema["properties"][key], values[key], f"{path}.{key}")
        in_schema |= deeper[0]
        in_values |= deeper[1]
    return in_schema, in_values


def test_schema_and_values_have_the_same_names() -> None:
    in_schema, in_values = paths(SCHEMA, VALUES)
    assert in_schema == in_values


def test_the_readme_explains_every_value_and_is_current() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    assert (CHART / "README.md").read_text(encoding="utf-8") == SYNC["readme"](text), "run tools/helm-sync"
    explained = {f".{path}" for path, _ in SYNC["explained"](text)}
    names = paths(SCHEMA, VALUES)[1]
    assert {name for name in names if not any(other.startswith(f"{name}.") for other in names)} == explained


# Nobody has more rights than needed


def test_every_pod_runs_as_nobody_without_privilege(scenarios: dict[str, Objects]) -> None:
    for objects in scenarios.values():
        for name, spec in pod_specs(objects):
            assert spec["automountServiceAccountToken"] is False, name
            assert spec["securityContext"]["runAsNonRoot"] is True, name
            assert spec["securityContext"]["runAsUser"] > 0, name
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
            for container in spec["containers"]:
                if container["name"] != "side":  # the user's
                    context = container["securityContext"]
                    assert context["readOnlyRootFilesystem"] is True, name
                    assert context["allowPrivilegeEscalation"] is False, name
                    assert context["capabilities"] == {"drop": ["ALL"]}, name


def test_no_service_s_address_becomes_a_setting(scenarios: dict[str, Objects]) -> None:
    """A Service called warmfront would put WARMFRONT_PORT=tcp://... into every pod of its namespace."""
    for objects in scenarios.values():
        for name, spec in pod_specs(objects):
            assert spec["enableServiceLinks"] is False, name


def test_labels_of_the_user_never_touch_selectors(helm: Helm) -> None:
    key = r"app\.kubernetes\.io/component=mine"
    objects = helm.template("--set", f"commonLabels.{key},worker.podLabels.{key},worker.podLabels.pool=h100")
    for item in objects:
        if item["kind"] == "Deployment":
            labels = item["spec"]["template"]["metadata"]["labels"]
            assert item["spec"]["selector"]["matchLabels"].items() <= labels.items()
            assert "mine" not in labels.values()
    assert one(objects, "Deployment", "-worker")["spec"]["template"]["metadata"]["labels"]["pool"] == "h100"


def test_the_chart_asks_for_no_role(scenarios: dict[str, Objects]) -> None:
    kinds = {item["kind"] for objects in scenarios.values() for item in objects}
    assert not [kind for kind in kinds if "Role" in kind]


def test_every_port_that_listens_has_a_policy_by_default(scenarios: dict[str, Objects]) -> None:
    for objects in (scenarios["defaults"], scenarios["ray"], scenarios["kuberay"]):
        policies = [item["spec"] for item in objects if item["kind"] == "NetworkPolicy"]
        for name, template in pod_templates(objects):
            if name.endswith("-test"):
                continue
            labels = template["metadata"]["labels"].items()
            (mine,) = [spec for spec in policies if spec["podSelector"]["matchLabels"].items() <= labels]
            assert all(rule["from"] for rule in mine["ingress"])
            to_all = [rule for rule in mine["ingress"] if "ports" not in rule]
            allowed = {port["port"] for rule in mine["ingress"] for port in rule.get("ports", [])}
            container = template["spec"]["containers"][0]
            if container["command"] == ["ray", "start"]:
                (peers,) = [peer["podSelector"] for rule in to_all for peer in rule["from"]]
                assert peers["matchLabels"]["app.kubernetes.io/instance"] == "wf"
                assert set(peers["matchExpressions"][0]["values"]) <= {"head", "router", "worker"}
            else:
                assert not to_all
                assert allowed == {port["name"] for port in container["ports"]}


def test_workers_take_calls_from_their_own_routers_alone(defaults: Objects) -> None:
    rules = one(defaults, "NetworkPolicy", "-worker")["spec"]["ingress"]
    calls = [rule for rule in rules if {"port": "grpc", "protocol": "TCP"} in rule["ports"]]
    router = one(defaults, "Deployment", "-router")["spec"]["selector"]["matchLabels"]
    assert [rule["from"] for rule in calls] == [[{"podSelector": {"matchLabels": router}}]]


def test_each_part_has_its_own_user_of_redis_where_the_secret_has_keys_for_them(helm: Helm) -> None:
    def key(objects: Objects, component: str, number: int = 0) -> str:
        env = pod(objects, component)["spec"]["containers"][number]["env"]
        (found,) = [item["valueFrom"]["secretKeyRef"] for item in env if item["name"] == "WARMFRONT_REDIS"]
        assert found["name"] == "s"
        return str(found["key"])

    secret = "redis.external.existingSecret=s"
    plain = helm.template(*set_all([secret, "redis.external.key=all"]))
    assert [key(plain, name) for name in ("router", "worker", "head")] == ["all"] * 3
    keys = [f"redis.external.{name}Key={name}-url" for name in ("router", "worker", "controller")]
    for mode in ([], RAY_WORKERS):
        own = helm.template(*set_all([secret, *keys, *mode]))
        assert [key(own, name) for name in ("router", "worker")] == ["router-url", "worker-url"]
        assert [key(own, "head", number) for number in (0, 1)] == ["controller-url"] * 2


@pytest.mark.parametrize(
    ("args", "port"),
    [
        (["redis.external.url=redis://r:6390/2"], 6390),
        (["redis.external.url=rediss://r"], 6379),
        (["redis.external.existingSecret=r", "redis.external.port=6380"], 6380),
        (["redis.bundled.port=7000"], 7000),
        (["redis.external.url=redis+sentinel://r/main", "redis.external.morePorts={6390}"], 6390),
    ],
)
def test_redis_is_let_through_on_its_port(helm: Helm, args: list[str], port: int) -> None:
    objects = helm.template("--set", ",".join(args))
    for side in ("-router", "-worker"):
        egress = one(objects, "NetworkPolicy", side)["spec"]["egress"]
        assert {"port": port, "protocol": "TCP"} in [p for rule in egress for p in rule.get("ports", [])]


def test_no_route_from_outside_leads_to_the_administration(scenarios: dict[str, Objects]) -> None:
    ingress = one(scenarios["ingress"], "Ingress")
    open_paths = [path["path"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
    assert not [path for path in open_paths if path in ("/", "/v1") or "drain" in path or "replicas" in path]


def test_no_secret_stands_in_arguments_or_plain_environment(scenarios: dict[str, Objects]) -> None:
    for objects in scenarios.values():
        secrets = [value for item in objects if item["kind"] == "Secret" for value in item["data"].values()]
        rest = json.dumps([item for item in objects if item["kind"] != "Secret"])
        assert not [value for value in secrets if value in rest]
        for where, spec in pod_specs(objects):
            for item in spec["containers"]:
                # A variable is secret that comes from a Secret, or that names such a one.
                secret: set[str] = set()
                for variable in item.get("env", []):
                    if "secretKeyRef" in variable.get("valueFrom", {}) or used(variable.get("value", "")) & secret:
                        secret.add(variable["name"])
                words = [*item.get("command", []), *item.get("args", [])]
                assert not {name for word in words for name in used(word)} & secret, where


def used(text: str) -> set[str]:
    """The variables that Kubernetes replaces in it."""
    return set(re.findall(r"\$\((\w+)\)", text))


# On Ray


ON_RAY = ("ray", "ray-workers", "kuberay")


def test_each_router_node_has_the_resource_of_one_router(scenarios: dict[str, Objects]) -> None:
    for objects in (scenarios[name] for name in ON_RAY):
        args = container(objects, "router")["args"]
        (resources,) = [json.loads(arg.partition("=")[2]) for arg in args if arg.startswith("--resources=")]
        assert desired(objects)["routers"]["resources"] == resources


def test_what_pods_and_desired_state_agree_on_is_in_the_resource_s_name(helm: Helm) -> None:
    names = set()
    for change in ("cache.blockSize=16", "router.ports.http=8080", "listenAddress=::", "cache.blockSize=32"):
        names |= set(desired(helm.template("--set", f"ray.mode=static,{change}"))["routers"]["resources"])
    assert len(names) == 4
    for change in ("router.flags.policy=random", "router.image.tag=v2", "router.replicas=3"):
        names |= set(desired(helm.template("--set", f"ray.mode=static,{change}"))["routers"]["resources"])
    assert len(names) == 4


def test_ray_uses_no_port_of_ours_and_takes_calls_with_a_token_alone(scenarios: dict[str, Objects]) -> None:
    for objects in (scenarios[name] for name in ON_RAY):
        for name in ("head", "router"):
            spec = pod(objects, name)["spec"]
            args = [arg.partition("=") for arg in spec["containers"][0]["args"]]
            ports = [int(value) for flag, _, value in args if flag.endswith("-port") or flag == "--port"]
            assert len(set(ports)) == len(ports) == (8 if name == "router" else 10)
            assert not set(ports) & {item["containerPort"] for item in spec["containers"][0]["ports"]} - {6379}
            for item in spec["containers"]:
                env = {entry["name"]: entry.get("value") for entry in item["env"]}
                assert env["RAY_AUTH_MODE"] == "token"
                assert env["RAY_AUTH_TOKEN_PATH"].startswith(item["volumeMounts"][0]["mountPath"])


def test_a_node_of_ray_drains_within_its_grace(scenarios: dict[str, Objects]) -> None:
    for objects in (scenarios[name] for name in ON_RAY):
        for component in ("router", "worker"):
            spec = pod(objects, component)["spec"]
            env = {item["name"]: item.get("value") for item in spec["containers"][0]["env"]}
            if drain := env.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"):
                own = int(settings(objects, component)["--drain-deadline"].removesuffix("s"))
                hook = VALUES["router"]["preStopSeconds"] if component == "router" else 0
                assert own < int(drain) < spec["terminationGracePeriodSeconds"] - hook


def test_workers_on_ray_have_a_gpu_each_and_room_to_roll(scenarios: dict[str, Objects]) -> None:
    objects = scenarios["ray-workers"]
    workers = desired(objects)["workers"]
    nodes = one(objects, "Deployment", "-worker")["spec"]["replicas"]
    gpus = container(objects, "worker")["resources"]["limits"]["nvidia.com/gpu"]
    assert "--num-gpus=4" in container(objects, "worker")["args"]
    assert (workers["num-gpus"], gpus, nodes) == (1, 4, 2)
    assert workers["replicas"] + workers["rollout"]["surge"] == nodes * gpus


def test_what_scales_workers_on_ray_is_the_controller_s(helm: Helm) -> None:
    assert "autoscale" not in desired(helm.template(*set_all(RAY_WORKERS)))["workers"]
    room = ["worker.ray.nodes=3", "worker.gpu.count=2", "worker.ray.surge=1"]
    workers = desired(helm.template(*set_all([*ON_RAY_SCALED, *room])))["workers"]
    assert workers["autoscale"] == {"min": 1, "max": 5}
    bounds = ["minReplicas=2", "maxReplicas=4", "targetWait=1s", "upWindow=30s", "downWindow=10m"]
    more = [*(f"worker.ray.autoscale.{bound}" for bound in bounds), "worker.ray.whenBelow=500ms"]
    workers = desired(helm.template(*set_all([*ON_RAY_SCALED, *room, *more])))["workers"]
    windows = {"target-wait": "1s", "up-window": "30s", "down-window": "10m"}
    assert workers["autoscale"] == {"min": 2, "max": 4, **windows}
    assert workers["rollout"]["when-below"] == "500ms"


def test_workers_of_one_pod_are_scraped_at_as_many_ports_as_fit_on_it(scenarios: dict[str, Objects]) -> None:
    objects = scenarios["ray-workers"]
    first = VALUES["worker"]["ports"]["metrics"]
    ports = {item["name"]: item["containerPort"] for item in container(objects, "worker")["ports"]}
    assert ports == {f"metrics-{number}": first + number for number in range(4)}
    monitor = one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert [end["port"] for end in monitor] == list(ports)
    (rule,) = [r for r in one(objects, "NetworkPolicy", "-worker")["spec"]["ingress"] if "ports" in r]
    assert [(port["port"], port["endPort"]) for port in rule["ports"]] == [(first, first + 3)]


def test_a_router_on_ray_serves_on_until_its_probe_has_failed(helm: Helm) -> None:
    assert "--drain-notice" not in settings(helm.template("--set", "ray.mode=none"), "router"), "preStop does that"
    for more, probed_s in (
        ([], 4),
        (["router.readinessProbe.periodSeconds=5", "router.readinessProbe.failureThreshold=3"], 15),
    ):
        objects = helm.template(*set_all(more))
        assert int(settings(objects, "router")["--drain-notice"].removesuffix("s")) > probed_s
        spec = pod(objects, "router")["spec"]
        env = {item["name"]: item.get("value") for item in spec["containers"][0]["env"]}
        node_s, drain_s = int(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]), VALUES["router"]["drainDeadlineSeconds"]
        assert node_s > drain_s + probed_s
        assert spec["terminationGracePeriodSeconds"] > node_s + VALUES["router"]["preStopSeconds"]


def test_the_controller_gives_a_worker_the_time_that_the_kubelet_would(helm: Helm) -> None:
    objects = helm.template(*set_all([*RAY_WORKERS, "worker.startupDeadlineSeconds=1800"]))
    assert desired(objects)["workers"]["start-deadline"] == "1800s"


@pytest.mark.parametrize(
    ("args", "least"),
    [
        (["worker.replicas=0"], 1),
        ([*RAY_WORKERS, "worker.replicas=0"], 1),
        (["worker.replicas=3"], 1),
        (["worker.replicas=4"], 2),
        (["worker.replicas=7"], 2),
        (["worker.replicas=16"], 8),
        (["worker.replicas=16", "router.minReadyReplicas=12"], 12),
        (["worker.keda.enabled=true,worker.keda.serverAddress=http://p,worker.keda.minReplicas=4"], 2),
        (["worker.keda.enabled=true,worker.keda.serverAddress=http://p,worker.keda.minReplicas=0"], 1),
        ([*ON_RAY_SCALED, "worker.ray.autoscale.minReplicas=4", "worker.ray.nodes=8"], 2),
    ],
)
def test_a_new_fleet_begins_with_half_of_its_workers(helm: Helm, args: list[str], least: int) -> None:
    assert settings(helm.template(*set_all(args)), "router")["--min-ready-replicas"] == str(least)


def test_kuberay_is_refused_where_it_is_not(helm: Helm) -> None:
    made = helm.run("template", "wf", str(CHART), "--set", "ray.mode=kuberay")
    assert made.returncode != 0
    assert "KubeRay operator" in made.stderr
    helm.template("--set", "ray.mode=kuberay", *re.findall(r"--api-versions \S+", made.stderr)[0].rstrip(".\n").split())


def test_quantities_are_those_of_kubernetes(helm: Helm) -> None:
    for said in ("2", "1.5", "500m", "16Gi", "1e9", "128974848"):
        helm.template("--set", f"worker.resources.limits.memory={said}")
    limits = container(helm.template("--set", "ray.mode=none,router.resources.limits=null"), "router")["resources"]
    assert "limits" not in limits


# The life of a pod


def test_whatever_runs_on_is_asked_whether_it_lives(scenarios: dict[str, Objects]) -> None:
    parts = {"router", "worker", "valkey", "head", "controller"}  # and not the user's sidecars
    for objects in scenarios.values():
        for name, spec in pod_specs(objects):
            if spec.get("restartPolicy") != "Never":
                ours = [item for item in spec["containers"] if item["name"] in parts]
                assert ours
                assert all({"startupProbe", "livenessProbe"} <= set(item) for item in ours), name


def test_grace_exceeds_what_runs_before_the_end(scenarios: dict[str, Objects]) -> None:
    for objects in scenarios.values():
        for component in ("router", "worker"):
            spec = pod(objects, component)["spec"]
            drain = int(settings(objects, component)["--drain-deadline"].removesuffix("s"))
            hook = container(objects, component).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
            assert spec["terminationGracePeriodSeconds"] > drain + (int(hook[1]) if hook else 0)


def test_a_worker_is_ready_when_its_health_says_so_and_replaced_before_it_goes(defaults: Objects) -> None:
    deployment = one(defaults, "Deployment", "-worker")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    worker = container(defaults, "worker")
    port = int(settings(defaults, "worker")["--port"])
    assert {worker[probe]["grpc"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {port}
    startup = worker["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= VALUES["worker"]["startupDeadlineSeconds"]
    liveness = worker["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > VALUES["worker"]["drainDeadlineSeconds"]


@pytest.mark.parametrize(
    "mode",
    [["ray.mode=none"], ["ray.mode=static"], RAY_WORKERS, ["ray.mode=kuberay", "worker.placement=ray"]],
    ids=["none", "static", "static workers", "kuberay workers"],
)
def test_a_probe_has_the_timing_of_the_values_in_every_mode(helm: Helm, mode: list[str]) -> None:
    probes = {
        "router": ["startupProbe", "livenessProbe", "readinessProbe"],
        "worker": ["livenessProbe", "readinessProbe"],
    }
    keys = ("failureThreshold", "periodSeconds", "timeoutSeconds")
    wanted = {
        f"{component}.{probe}.{key}": 20 + 3 * number + digit
        for number, (component, probe) in enumerate((c, p) for c in probes for p in probes[c])
        for digit, key in enumerate(keys)
    }
    more = ["worker.terminationGracePeriodSeconds=2000", "router.terminationGracePeriodSeconds=2000"]
    objects = helm.template(*set_all([*mode, *more, *(f"{name}={value}" for name, value in wanted.items())]))
    for name, value in wanted.items():
        component, probe, key = name.split(".")
        assert container(objects, component)[probe][key] == value, name
    for component in probes:
        left = container(helm.template(*set_all(mode)), component)["livenessProbe"]
        assert left["failureThreshold"] * left["periodSeconds"] >= 30, "what is not asked for has its default"


def test_tls_takes_the_place_of_plain_text_and_probes_go_where_they_need_no_certificate(
    scenarios: dict[str, Objects], defaults: Objects
) -> None:
    for component in ("router", "worker"):
        assert "--insecure-listen" in settings(defaults, component)
        flags = settings(scenarios["tls"], component)
        assert "--insecure-listen" not in flags
        assert {"--tls-cert", "--tls-key", "--tls-client-ca"} <= flags.keys()
        given = container(scenarios["tls"], component)
        probes = [given[probe] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
        asked = [probe["httpGet"]["port"] for probe in probes if "httpGet" in probe]
        assert asked == ["metrics"] * (1 if component == "router" else 3)  # a router's other two ask its node of Ray
    protocols = {port["appProtocol"] for port in one(scenarios["tls"], "Service", "-router")["spec"]["ports"]}
    assert protocols == {"https"}


def test_no_pod_is_given_the_key_of_another(scenarios: dict[str, Objects]) -> None:
    given = {"router": {"public-tls", "wf-warmfront-router-tls"}, "worker": {"wf-warmfront-worker-tls"}, "head": set()}
    for component, secrets in given.items():
        sources = secret_sources(pod(scenarios["tls"], component))
        assert {source["name"] for source in sources for item in source["items"] if item["key"] == "tls.key"} == secrets


def secret_sources(template: dict[str, Any]) -> list[dict[str, Any]]:
    volumes = template["spec"].get("volumes", [])
    return [source["secret"] for volume in volumes for source in volume.get("projected", {}).get("sources", [])]


TOKEN, RAY, SEED = "worker-token", "ray-token", "hash-seed"


@pytest.mark.parametrize(
    ("scenario", "wanted"),
    [
        ("defaults", {"router": {TOKEN, RAY}, "worker": {TOKEN}, "head": {RAY}, "valkey": set(), "test": set()}),
        ("ray-workers", {"router": {TOKEN, RAY, SEED}, "worker": {TOKEN, RAY, SEED}, "head": {RAY, SEED}}),
        ("ingress", {"router": {TOKEN}, "worker": {TOKEN}}),
        ("seeded", {"router": {TOKEN, SEED}, "worker": {TOKEN, SEED}}),
        (
            "tls",
            {
                "router": {TOKEN, RAY, "public.crt", "public.key", "public-ca.crt", "clients-ca.crt"}
                | {"router.crt", "router.key", "workers-ca.crt"},
                "worker": {TOKEN, "worker.crt", "worker.key", "routers-ca.crt"},
                "head": {RAY},
            },
        ),
    ],
)
def test_each_pod_has_the_secret_files_that_it_reads_and_no_other(
    scenarios: dict[str, Objects], scenario: str, wanted: dict[str, set[str]]
) -> None:
    for component, files in wanted.items():
        sources = secret_sources(pod(scenarios[scenario], component))
        assert {item["path"] for source in sources for item in source["items"]} == files, component


def test_one_gpu_or_none(helm: Helm, defaults: Objects) -> None:
    assert container(defaults, "worker")["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container(defaults, "worker")["image"].endswith("-cuda")
    cpu = container(helm.template("--set", "worker.gpu.count=0"), "worker")
    assert "nvidia.com/gpu" not in cpu["resources"]["limits"]
    assert cpu["image"].endswith("-cpu")


def test_who_scales_sets_the_number(scenarios: dict[str, Objects]) -> None:
    for component in ("router", "worker"):
        assert "replicas" not in one(scenarios["production"], "Deployment", f"-{component}")["spec"]


def test_valkey_and_the_test_run_where_they_are_told(helm: Helm) -> None:
    valkey = ["podLabels.pool=small", "podAnnotations.a=b", "priorityClassName=high"]
    objects = helm.template(
        *set_all([f"redis.bundled.{value}" for value in valkey]),
        *set_all(["tests.nodeSelector.pool=cpu", "tests.tolerations[0].operator=Exists"]),
    )
    found = pod(objects, "valkey")
    assert found["metadata"]["labels"]["pool"] == "small"
    assert found["metadata"]["annotations"] == {"a": "b"}
    assert found["spec"]["priorityClassName"] == "high"
    spec = pod(objects, "test")["spec"]
    assert (spec["nodeSelector"], spec["tolerations"]) == ({"pool": "cpu"}, [{"operator": "Exists"}])


def test_a_route_s_time_limits_are_left_to_the_gateway_where_asked(helm: Helm) -> None:
    route = ["gateway.httpRoute.enabled=true", "gateway.parentRefs[0].name=public"]
    for more, wanted in (
        ([], {"request": "0s"}),
        (["gateway.httpRoute.timeouts.backendRequest=30m"], {"request": "0s", "backendRequest": "30m"}),
        (["gateway.httpRoute.timeouts.request=null"], None),
    ):
        (rule,) = one(helm.template(*set_all([*route, *more])), "HTTPRoute")["spec"]["rules"]
        assert rule.get("timeouts") == wanted


def test_spread_constraints_select_their_own_pods(scenarios: dict[str, Objects]) -> None:
    for component in ("router", "worker"):
        spec = one(scenarios["production"], "Deployment", f"-{component}")["spec"]
        for constraint in spec["template"]["spec"]["topologySpreadConstraints"]:
            assert constraint["labelSelector"] == spec["selector"]


def test_an_upgrade_of_the_chart_alone_restarts_no_pod(helm: Helm, tmp_path: Path) -> None:
    newer = tmp_path / "helm"
    shutil.copytree(CHART, newer)
    chart = (newer / "Chart.yaml").read_text(encoding="utf-8")
    (newer / "Chart.yaml").write_text(re.sub(r"(?m)^version: .+$", "version: 99.0.0", chart), encoding="utf-8")
    made = helm.run("template", "wf", str(newer))
    new = [item for item in yaml.safe_load_all(made.stdout) if item]
    for component in ("router", "worker", "valkey", "head"):
        assert pod(helm.template(), component) == pod(new, component)


def test_scenarios_are_there() -> None:
    assert {path.name for path in SCENARIOS} >= {"defaults-values.yaml", "cpu-values.yaml", "production-values.yaml"}
