"""``warmfront rollout``: replace the workers of a running cluster, a few at a time, so that nobody notices."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from router.reconcile import Group
from warmfront.console import Progress, say
from warmfront.desired import parse
from warmfront.errors import DeadlinePassed, Failure, WrongUse
from warmfront.flags import Flag, flags_of
from warmfront.preflight import find_model
from warmfront.values import FILE, Duration, Integer, format_duration
from warmfront.wishes import Wishes, cluster_options, find, key_of, wait

_REPORT_MARGIN_S = 120.0  # for the controller to take up the file, and to roll back
_TAKE_UP_S = 10.0  # for the controller to take up the file
_NO_TEXT = (click.types.BoolParamType, click.types.IntParamType, click.types.FloatParamType)
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
@click.option("--model", type=FILE, help="The same weights in another place.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="A flag of the workers; empty: none.")
@click.option("--surge", type=Integer(0, 64), help="Workers beyond the count meanwhile; 0: an old one first.")
@click.option("--batch", type=Integer(1, 64), help="Workers replaced at once.")
@click.option("--when-below", type=Duration(), help="Begin no batch while more prefill waits per worker.")
@click.option("--deadline", type=Duration(), help="Of the whole; then it is rolled back. Default: 30m.")
@click.option("--undo", is_flag=True, help="Go back from a rollout that is under way.")
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
    undo: bool,
    no_wait: bool,
) -> None:
    """Replace every worker, with other settings or the same: a new one comes up and pre-warms, then an old one drains.

    Halts and brings the old settings back when a new worker does not become READY. Exit codes: 0 all are replaced,
    1 rolled back, 2 refused, 3 rolled back at the deadline.
    """
    wishes = find(ready_file=ready_file, url=url, desired_file=desired_file, state_dir=state_dir)
    given = {
        "surge": surge,
        "batch": batch,
        "when_below": None if when_below is None else format_duration(when_below),
        "deadline": None if deadline is None else format_duration(deadline),
    }
    if undo and (model or changes):
        raise WrongUse("--undo goes back to what was: it takes no --model and no --set")
    with wishes.locked():
        current = wishes.read()
        content = _undone(wishes, current) if undo else _changed(wishes, current, model, changes, given)
        try:
            wishes.write(content)
        except WrongUse:
            if not undo:
                wishes.forget_before()
            raise
        if no_wait:
            click.echo("the rollout is wanted; status.json of the controller tells how it goes")
            return
        started_s = time.monotonic()
        try:
            why = _follow(wishes, content)
        except KeyboardInterrupt:
            say("the controller goes on with it; `warmfront rollout --undo` goes back")
            raise
        if why is not None and not undo:
            wishes.write(current)  # what is wanted is again what runs
            restored = _workers_of(current).revision  # waited for, so that the same can be tried again
            wait(lambda: wishes.workers().get("revision") == restored, _TAKE_UP_S)
        wishes.forget_before()
        if why is not None:
            raise why
    click.echo(f"{'as before' if undo else 'every worker is replaced'} ({time.monotonic() - started_s:.0f} s)")


def _undone(wishes: Wishes, current: dict[str, Any]) -> dict[str, Any]:
    """What was wanted before the rollout that is under way. Raises ``WrongUse`` where none is."""
    before = _settle(wishes, current)
    if before is None:
        raise WrongUse(
            "--undo: no rollout of this cluster is under way; what one has changed that has ended, another changes back"
        )
    return _with_workers_of(before, current)


def _changed(
    wishes: Wishes, current: dict[str, Any], model: Path | None, changes: tuple[str, ...], rules: Mapping[str, Any]
) -> dict[str, Any]:
    """What is to be wanted from now on; ``current`` is kept for the way back. ``rules``: None leaves one as it is.

    Raises ``WrongUse``, also where a rollout is under way.
    """
    attempt = _workers_of(current).rollout.attempt  # of what was tried last, whatever has become of it
    if _settle(wishes, current) is not None:
        raise WrongUse(
            "a rollout that another command has begun is under way: wait for it, or go back by `warmfront rollout "
            "--undo`"
        )
    content = copy.deepcopy(current)
    workers = content["workers"]
    change_settings(workers, model, changes)
    known = workers.setdefault(key_of(workers, "rollout"), {})
    known |= {key_of(known, name): value for name, value in rules.items() if value is not None}
    known["attempt"] = attempt + 1
    wishes.keep_before(current)
    return content


def _settle(wishes: Wishes, current: dict[str, Any]) -> dict[str, Any] | None:
    """What was wanted before a rollout that is under way; None where there is none.

    Of one whose command was interrupted and that has ended since: takes what failed out of ``current``.
    """
    before = wishes.before()
    if before is None:
        return None
    told = wishes.workers()
    is_told = told.get("revision") == _workers_of(current).revision
    if is_told and told["phase"] in ("rolled back", "halted"):
        settled = _with_workers_of(before, current)
        current.clear()
        current.update(settled)
    elif not is_told or told["phase"] != "steady":
        return before
    wishes.forget_before()
    return None


def _with_workers_of(before: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """``current`` with the settings of ``before``, and with its own number of workers."""
    content = copy.deepcopy(current)
    for name in ("settings", "rollout"):
        content["workers"].pop(key_of(content["workers"], name), None)
        if (key := key_of(before["workers"], name)) in before["workers"]:
            content["workers"][key] = copy.deepcopy(before["workers"][key])
    return content


def change_settings(workers: dict[str, Any], model: Path | None, changes: tuple[str, ...]) -> None:
    """Applies ``--model`` and ``--set`` to the workers of a file. Raises ``WrongUse`` for what makes another fleet."""
    settings = workers.setdefault(key_of(workers, "settings"), {})
    known = {flag.param: flag for flag in flags_of("worker")}
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
            settings[key] = _typed(known[param], value)
        else:
            settings.pop(key, None)


def _typed(flag: Flag, value: str) -> Any:
    """As a file has it: numbers and truths are no text there. What is none is left for the check of the whole."""
    if flag.multiple:
        return [part.strip() for part in value.strip("[]").split(",")]
    kind: click.ParamType[Any] = click.types.convert_type(flag.type)
    if not isinstance(kind, _NO_TEXT):
        return value
    try:
        return kind(value)
    except click.BadParameter:
        return value


def _workers_of(content: dict[str, Any]) -> Group:
    try:
        return next(group for group in parse(content).groups if group.role == "worker")
    except ValueError as error:
        raise WrongUse(str(error)) from error


def _follow(wishes: Wishes, content: dict[str, Any]) -> Failure | None:
    """Shows how it goes until it has ended; why it failed, if it did."""
    group = _workers_of(content)
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
