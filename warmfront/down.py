"""``warmfront down``: ends a cluster that runs, removes what a killed `up` left."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import click

from warmfront.errors import Failure, WrongUse
from warmfront.run_dir import RunDir, all_run_dirs, wait_gone

DRAIN_DEADLINE_S = 60.0


@click.command()
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path),
    help="The cluster that wrote this file. Default: the only one here.",
)
@click.option("--all", "everything", is_flag=True, help="Every cluster of this user on this machine.")
def down(*, ready_file: Path | None, everything: bool) -> None:
    """End a cluster on this machine, or remove what a killed `up` left: processes, Ray session, files."""
    clusters = all_run_dirs()
    if ready_file is not None:
        clusters = [_of_ready_file(ready_file, clusters)]
    elif len(clusters) > 1 and not everything:
        names = ", ".join(f"{cluster.path} ({cluster.cluster.get('http', 'not ready')})" for cluster in clusters)
        raise WrongUse(f"{len(clusters)} clusters are here; say --all or --ready-file FILE: {names}")
    if not clusters:
        click.echo("No cluster of yours is on this machine.")
    for cluster in clusters:
        end(cluster)


def end(cluster: RunDir) -> None:
    """Asks the `up` of a cluster to stop, if it still runs, and removes whatever remains."""
    name = cluster.cluster.get("http", str(cluster.path))
    owner = cluster.owner()
    if owner is not None:
        owner.signal(signal.SIGTERM)
        if not wait_gone([owner], DRAIN_DEADLINE_S):
            owner.signal(signal.SIGKILL)
    ended = cluster.remove()
    if cluster.path.exists():
        raise Failure(f"cannot remove {cluster.path}: look who holds it")
    how = "stopped" if owner is not None else f"removed what was left of it ({len(ended)} processes)"
    click.echo(f"{name}: {how}")


def _of_ready_file(path: Path, clusters: list[RunDir]) -> RunDir:
    try:
        run_dir = Path(json.loads(path.read_text(encoding="utf-8"))["run_dir"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WrongUse(f"--ready-file {path}: no ready file of `warmfront up` ({error!r})") from error
    for cluster in clusters:
        if cluster.path == run_dir:
            return cluster
    path.unlink()  # its cluster is gone, and only this file was left
    raise WrongUse(f"the cluster of {path} is gone already; removed the file")
