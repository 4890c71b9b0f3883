"""``warmfront scale N``: how many workers a running cluster has."""

from __future__ import annotations

from pathlib import Path

import click

from warmfront.console import Progress, counted
from warmfront.errors import DeadlinePassed, Failure, WrongUse
from warmfront.flags import MAX_REPLICAS
from warmfront.preflight import gpus_of
from warmfront.values import Duration, Integer, format_duration
from warmfront.wishes import Wishes, cluster_options, find, key_of, wait


@click.command()
@click.argument("count", type=Integer(1, 1024))
@cluster_options
@click.option("--deadline", type=Duration(), default="10m", show_default=True, help="Stop waiting then; it goes on.")
@click.option("--no-wait", is_flag=True, help="Only say what is wanted.")
def scale(
    *,
    count: int,
    ready_file: Path | None,
    url: str | None,
    desired_file: Path | None,
    state_dir: Path | None,
    deadline: float,
    no_wait: bool,
) -> None:
    """Let COUNT workers run: new ones pre-warm before they take requests, those that go end what they answer."""
    wishes = find(ready_file=ready_file, url=url, desired_file=desired_file, state_dir=state_dir)
    with wishes.locked():
        content = wishes.read()
        workers = content["workers"]
        if workers.get("autoscale"):
            raise WrongUse("autoscale sets the number of workers: change its min and max")
        _check_machine(wishes, workers, count)
        workers[key_of(workers, "replicas")] = count
        workers["attempt"] = int(workers.get("attempt", 0)) + 1  # what was drained comes back
        wishes.write(content)
        if no_wait:
            click.echo(f"{_workers(count)} wanted")
            return
        with Progress() as progress:
            if not wait(lambda: _is_there(wishes, count, workers["attempt"], progress), deadline):
                raise DeadlinePassed(
                    f"not {counted(count, 'READY worker')} after {format_duration(deadline)}; the controller goes on: "
                    + ", ".join(f"{part['name']} {part['state']}" for part in wishes.parts())
                )
    click.echo(f"{_workers(count)} READY")


def _workers(count: int) -> str:
    return f"{counted(count, 'worker')} {'is' if count == 1 else 'are'}"


def _is_there(wishes: Wishes, count: int, attempt: int, progress: Progress) -> bool:
    group, parts = wishes.workers(), wishes.parts()
    if group.get("attempt") != attempt or group.get("count") != count:
        return False
    progress.update(", ".join(f"{part['name']} {part['state']}" for part in parts))
    for part in parts:
        if part["fault"]:
            raise Failure(f"{part['name']} does not start, and is tried again: {part['fault']}")
    return len(parts) == count and group["ready"] == count


def _check_machine(wishes: Wishes, workers: dict[str, object], count: int) -> None:
    """The workers of an `up` share one machine, and where each takes a GPU there cannot be more than those."""
    if wishes.run_dir is None:
        return
    if count > MAX_REPLICAS:
        raise WrongUse(f"{count} workers: a cluster of one machine has at most {MAX_REPLICAS}")
    gpus = gpus_of("auto")
    if workers.get("num_gpus") and count > gpus:
        raise WrongUse(f"{counted(count, 'worker')}: each takes one GPU, and this machine has {gpus}")
