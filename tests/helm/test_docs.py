"""docs/deploy.md speaks of values and alerts that exist."""

from __future__ import annotations

import re

from tests.helm.test_monitoring import alerts
from tests.helm.test_values import SCHEMA
from tests.helm.tools import CHART, ROOT, Helm, Objects

TEXT = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
TOP = "|".join(SCHEMA["properties"])


def test_every_value_in_the_text_is_in_the_schema() -> None:
    named = set(re.findall(rf"`((?:{TOP})(?:\.[\w-]+)+)", TEXT)) | set(re.findall(r"--set ([\w.-]+)=", TEXT))
    assert len(named) > 15
    for name in named:
        schema = SCHEMA
        for key in name.split("."):
            assert key in schema.get("properties", {}), name
            schema = schema["properties"][key]


def test_every_alert_is_explained_and_no_other(scenarios: dict[str, Objects]) -> None:
    assert set(re.findall(r"Warmfront[A-Z]\w+", TEXT)) == {rule["alert"] for rule in alerts(scenarios["production"])}


def test_notes_say_where_the_release_listens_and_what_is_open(helm: Helm) -> None:
    def notes(*args: str) -> str:
        made = helm.run("install", "wf", str(CHART), "--dry-run=client", *args)
        assert made.returncode == 0, made.stderr
        return made.stdout.partition("NOTES:")[2]

    assert "http://wf-warmfront-router.default:8000/v1" in notes()
    assert "networkPolicy.clients" in notes()
    assert "ANY POD" in notes("--set", "networkPolicy.enabled=false")
