"""``warmfront rollout``: replace the workers of a running cluster, a few at a time, so that nobody notices."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import click

from warmfront.console import Progress
from warmfront.desired import parse
from warmfront.errors import DeadlinePassed, Failure, WrongUse
from warmfront.options import Duration, flags_of, format_duration
from warmfront.preflight import find_model
from warmfront.wishes import Wishes, cluster_options, find, key_of, wait

_REPORT_MARGIN_S = 120.0  # for the controller to take up the file, and to roll back
# What replicas must share to answer for each other: another value makes another fleet.
_CONTRACT = (
    "served_model_name",
    "dtype",
    "kv_cache_dtype",
    "mode",
    "max_model_len",
    "prefix_caching_hash_algo",
    "prefix_caching_hash_seed_file",
    "block_size",
)


@click.command()
@cluster_options
@click.option("--model", type=click.Path(path_type=Path), help="The same weights in another place.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="A flag of the workers; empty: none.")
@click.option("--surge", type=click.IntRange(0, 64), help="Workers beyond the count meanwhile; 0: an old one first.")
@click.option("--batch", type=click.IntRange(1, 64), help="Workers replaced at once.")
@click.option("--when-below", type=Duration(), help="Begin no batch while more prefill waits per worker.")
@click.option("--deadline", type=Duration(), help="Of the whole; then it is rolled back. Default: 30m.")
@click.option("--no-wait", is_flag=True, help="Only say what is wanted.")
def rollout(
    *,
    ready_file: Path | None,
    url: str | None,
    desired_file: Path | None,
    state_dir: Path | None,
    model: Path | None,
    changes: tuple[str, ...],
    surge: int | None,
    batch: int | None,
    when_below: float | None,
    deadline: float | None,
    no_wait: bool,
) -> None:
    """Replace every worker, with other settings or the same: a new one comes up and pre-warms, then an old one drains.

    Halts and brings the old settings back when a new worker does not become READY. Exit codes: 0 all are replaced,
    1 rolled back, 2 refused, 3 rolled back at the deadline.
    """
    wishes = find(ready_file=ready_file, url=url, desired_file=desired_file, state_dir=state_dir)
    with wishes.locked():
        before = wishes.read()
        content = copy.deepcopy(before)
        workers = content["workers"]
        change_settings(workers, model, changes)
        rules = workers.setdefault(key_of(workers, "rollout"), {})
        given: dict[str, Any] = {"surge": surge, "batch": batch}
        for name, seconds in (("when_below", when_below), ("deadline", deadline)):
            given[name] = None if seconds is None else format_duration(seconds)
        for name, value in given.items():
            if value is not None:
                rules[key_of(rules, name)] = value
        rules["attempt"] = int(rules.get("attempt", 0)) + 1
        wishes.write(content)
        if no_wait:
            click.echo("the rollout is wanted; status.json of the controller tells how it goes")
            return
        started_s = time.monotonic()
        why = _follow(wishes, content)
        if why is not None:
            wishes.write(before)  # what is wanted is again what runs
            raise why
    click.echo(f"every worker is replaced ({time.monotonic() - started_s:.0f} s)")


def change_settings(workers: dict[str, Any], model: Path | None, changes: tuple[str, ...]) -> None:
    """Applies ``--model`` and ``--set`` to the workers of a file. Raises ``WrongUse`` for what makes another fleet."""
    settings = workers.setdefault(key_of(workers, "settings"), {})
    known = {flag.param for flag in flags_of("worker")}
    if model is not None:
        find_model(model)
        settings[key_of(settings, "model")] = str(model.absolute())
    for change in changes:
        name, separator, value = change.partition("=")
        param = name.strip().lstrip("-").replace("-", "_")
        if not separator:
            raise WrongUse(f"--set {change}: write KEY=VALUE with a flag of `warmfront worker`, such as kv-blocks=4096")
        if param not in known:
            raise WrongUse(f"--set {change}: {name.strip()} is no flag of `warmfront worker`; its --help lists them")
        key = key_of(settings, param)
        if param in _CONTRACT and str(settings.get(key, "")) != value:
            raise WrongUse(
                f"--set {change}: replicas must share their {param.replace('_', '-')}, so that makes another fleet. "
                "Start it beside this one (another --fleet, and --prewarm-from-fleet with the name of this one), move "
                "the clients, then end this one"
            )
        if value:
            settings[key] = _typed(value)
        else:
            settings.pop(key, None)


def _typed(value: str) -> Any:
    """As YAML would read it: numbers and truths are no text there."""
    import yaml

    return yaml.safe_load(value)


def _follow(wishes: Wishes, content: dict[str, Any]) -> Failure | None:
    """Shows how it goes until it has ended; why it failed, if it did."""
    (group,) = (one for one in parse(content).groups if one.role == "worker")
    with Progress() as progress:
        ended = wait(lambda: _has_ended(wishes, group.revision, progress), group.rollout.deadline_s + _REPORT_MARGIN_S)
    told = wishes.workers()
    if not ended or told.get("revision") != group.revision:
        return DeadlinePassed("the controller does not tell that it has ended; does one run?")
    if told["phase"] == "steady":
        return None
    text = f"{told['why']}; {'rolled back' if told['good'] else 'halted, with no settings known to go back to'}"
    if " in the fleet" in text:
        text += ". What differs makes another fleet: start it beside this one, move the clients, then end this one"
    return DeadlinePassed(text) if told["timed_out"] else Failure(text)


def _has_ended(wishes: Wishes, revision: str, progress: Progress) -> bool:
    told = wishes.workers()
    if told.get("revision") != revision:
        return False
    states = ", ".join(f"{part['name']} {part['state']}" for part in wishes.parts())
    progress.update(f"{told['phase']}: {told['new']} of {told['count']} replaced, {told['ready']} serve", states)
    return told["phase"] in ("steady", "rolled back", "halted")
