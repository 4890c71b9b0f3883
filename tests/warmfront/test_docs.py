"""docs/reference.md says what the program does: its tables are compared with the flags and with /metrics."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import click
import pytest
from prometheus_client import CollectorRegistry

from router.metrics import RouterMetrics
from warmfront.__main__ import COMMANDS, cli
from warmfront.controller import ControllerMetrics
from warmfront.flags import CONFIGS, FLAGS, default_of, flags_of
from worker.metrics import WorkerMetrics
from worker.request import EngineSnapshot

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def table(first_cell: str) -> dict[str, list[str]]:
    """The rows whose first cell matches, by that cell."""
    rows = [line.strip("| ").split(" | ") for line in REFERENCE.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows if re.fullmatch(first_cell, row[0])}


def test_the_table_of_flags_is_the_program_s() -> None:
    expected = {}
    for flag in FLAGS:
        commands = [command for command in CONFIGS if flag in flags_of(command)]
        defaults = {default_of(flag, command) for command in commands} - {None}
        default = str(defaults.pop()) if defaults else "-"
        default = default.lower() if default in ("True", "False") else default
        expected[f"--{flag.name}"] = [", ".join(commands), default, flag.help]
    assert table("`--[a-z-]+`") == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_help_has_every_flag_of_the_table(name: str) -> None:
    module, attribute, _ = COMMANDS[name]
    command: click.Command = getattr(importlib.import_module(module), attribute)
    text = command.get_help(click.Context(command)) + "\n"
    listed = {flag for flag, row in table("`--[a-z-]+`").items() if name in row[0].split(", ")}
    assert {
        flag
        for flag in listed
        if f"{flag} " not in text and f"{flag}\n" not in text and f"{flag}/" not in text.replace(" / ", "/")
    } == set()


def test_every_command_stands_in_the_reference() -> None:
    for command in cli.list_commands(click.Context(cli)):
        assert re.search(rf"`{command}[` ]", REFERENCE), command


def names_of(registry: CollectorRegistry) -> set[str]:
    """Names as /metrics shows them in its TYPE lines; counters with their _total."""
    families = list(registry.collect())
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def test_the_table_of_metrics_is_what_the_parts_export() -> None:
    worker = WorkerMetrics(view=EngineSnapshot, now=0.0).registry
    controller = ControllerMetrics().registry
    exported = names_of(RouterMetrics().registry) | names_of(worker) | names_of(controller)
    assert set(table(r"`warmfront_[a-z0-9_]+`")) == exported


def test_names_of_other_systems_stand_there_too() -> None:
    registry = WorkerMetrics(view=EngineSnapshot, now=0.0, compat=True).registry
    for name in names_of(registry):
        assert f"`{name}`" in REFERENCE


def test_the_locks_pin_every_dependency_once_and_name_no_place_to_get_it_from() -> None:
    runtime, dev = ((ROOT / name).read_text().splitlines() for name in ("requirements.lock", "requirements-dev.lock"))
    pins = [line for line in runtime + dev if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in pins), "no URL, no +local version"
    names = [re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins]
    assert len(set(names)) == len(names)
    assert "torch==2.13.0" in pins
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))], "torch brings its own"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for group in project["optional-dependencies"].values() for one in group]
    wanted = {re.split(r"[^A-Za-z0-9._-]", one)[0].lower() for one in project["dependencies"] + extras} - {"warmfront"}
    assert wanted <= set(names)


def test_links_between_the_documents_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
            assert "://" in target or (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_test_named_in_the_list_of_faults_exists() -> None:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    assert len(named) > 40
    missing = [
        f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert missing == []
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| seen", "| ---"))]
    assert all("`tests/" in row for row in rows)
