"""docs/deploy.md and the runbook of docs/operations.md speak of values, alerts, metrics and commands that exist."""

from __future__ import annotations

import re

import pytest

from tests.helm.test_monitoring import alerts, exported
from tests.helm.test_values import SCHEMA
from tests.helm.tools import CHART, ROOT, Helm, Objects, one
from warmfront.__main__ import COMMANDS
from warmfront.flags import flags_of

TEXT = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
RUNBOOK = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").partition("## What an alert asks of you\n")[2]
RUNBOOK = RUNBOOK.partition("\n## ")[0]
ROWS = [row.strip("| ").split(" | ") for row in RUNBOOK.splitlines() if row.startswith("| `")]
TOP = "|".join(SCHEMA["properties"])


@pytest.mark.parametrize("text", [TEXT, RUNBOOK], ids=["deploy.md", "runbook"])
def test_every_value_in_the_text_is_in_the_schema(text: str) -> None:
    named = set(re.findall(rf"`((?:{TOP})(?:\.[\w-]+)+)", text)) | set(re.findall(r"--set ([\w.-]+)=", text))
    assert len(named) > 10
    for name in named:
        schema = SCHEMA
        for key in name.split("."):
            assert key in schema.get("properties", {}), name
            schema = schema["properties"][key]


def test_every_alert_is_explained_and_no_other(scenarios: dict[str, Objects]) -> None:
    told = {rule["alert"] for rule in alerts(scenarios["production"])}
    assert set(re.findall(r"Warmfront[A-Z]\w+", TEXT)) == told
    assert {name for row in ROWS for name in re.findall(r"Warmfront[A-Z]\w+", row[0])} == told, (
        "a row of the runbook for each"
    )


def test_the_runbook_asks_for_nothing_that_does_not_exist() -> None:
    assert all(len(row) == 4 and all(row) for row in ROWS)
    series = exported()
    assert set(re.findall(r"`(warmfront_\w+)`", RUNBOOK)) <= {
        *series,
        *(name.removesuffix("_count") for name in series),
    }
    assert set(re.findall(r"`(?:[^`]*-- )?warmfront (\w+)", RUNBOOK)) <= set(COMMANDS)
    flags = {f"--{flag.name}" for component in ("router", "worker") for flag in flags_of(component)}
    assert set(re.findall(r"`(--[a-z-]+)`", RUNBOOK)) - {"--previous"} <= flags  # of kubectl
    assert set(re.findall(r"Warmfront[A-Z]\w+", RUNBOOK)) == {
        n for row in ROWS for n in re.findall(r"Warmfront\w+", row[0])
    }


def test_every_figure_to_watch_is_on_the_dashboard(scenarios: dict[str, Objects]) -> None:
    table = TEXT.partition("| figure | good | else |")[2].partition("\n\n")[0]
    named = re.findall(r"warmfront_\w+", table)
    assert len(named) > 4
    (board,) = one(scenarios["production"], "ConfigMap", "-dashboard")["data"].values()
    for metric in named:
        assert re.search(rf"\b{metric}(_bucket)?\b", board), metric


def test_notes_warn_where_the_longest_context_is_left_to_the_first_worker(helm: Helm) -> None:
    def warns(*values: str) -> bool:
        made = helm.run("install", "wf", str(CHART), "--dry-run=client", *(w for v in values for w in ("--set", v)))
        assert made.returncode == 0, made.stderr
        return "worker.flags.max-model-len is not set" in made.stdout

    assert warns()
    assert not warns("worker.flags.max-model-len=4096")
    assert not warns("worker.flags.engine=simulated", "worker.gpu.count=0")


def test_notes_say_where_the_release_listens_and_what_is_open(helm: Helm) -> None:
    def notes(*args: str) -> str:
        made = helm.run("install", "wf", str(CHART), "--dry-run=client", *args)
        assert made.returncode == 0, made.stderr
        return made.stdout.partition("NOTES:")[2]

    assert "http://wf-warmfront-router.default:8000/v1" in notes()
    assert "networkPolicy.clients" in notes()
    assert "ANY POD" in notes("--set", "networkPolicy.enabled=false")
