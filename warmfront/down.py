"""``warmfront down``: ends a cluster that runs, removes what a killed `up` left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import click

from warmfront.client import Client, say_which
from warmfront.errors import Failure, WrongUse
from warmfront.files import read_text
from warmfront.flags import ENV_PREFIX
from warmfront.run_dir import RunDir, all_run_dirs, wait_gone
from warmfront.values import FILE

_KILL_MARGIN_S = 30.0  # beyond what `up` gives its parts to drain


@click.command()
@click.option("--ready-file", type=FILE, help="The cluster that wrote this file.")
@click.option("--url", help=f"The cluster whose HTTP address this is. Default: {ENV_PREFIX}URL.")
@click.option("--all", "everything", is_flag=True, help="Every cluster of this user on this machine.")
def down(*, ready_file: Path | None, url: str | None, everything: bool) -> None:
    """End a cluster on this machine, or remove what a killed `up` left: processes, Ray session, files.

    Without an option: whatever killed ones left; where nothing was left, the cluster that runs, if it is the only one.
    """
    if sum((ready_file is not None, url is not None, everything)) > 1:
        raise WrongUse("give --ready-file, --url or --all, not two of them")
    if ready_file is None and not everything:
        url = url or os.environ.get(ENV_PREFIX + "URL")  # no option's default: it gives way to the others
    clusters = all_run_dirs()
    if not clusters and ready_file is None and url is None:
        click.echo("No cluster of yours is on this machine.")
    if ready_file is not None:
        chosen = [find_ready_file(ready_file, clusters)]
    elif url is not None:
        chosen = [find_url(url, clusters)]
    else:
        chosen = clusters if everything else _only(clusters)
        if not everything:
            for cluster in chosen:
                if cluster.owner() is not None:
                    say_which(_names([cluster]))
    for cluster in chosen:
        end(cluster)
    left = [cluster for cluster in clusters if cluster not in chosen and cluster.owner()]
    if left and ready_file is None and url is None:
        click.echo(f"still running: {_names(left)}; end one by --url or --ready-file, or --all")


def end(cluster: RunDir) -> None:
    """Asks the `up` of a cluster to stop, if it still runs, and removes whatever remains."""
    name = cluster.cluster.get("http", str(cluster.path))
    owner = cluster.owner()
    if owner is not None:
        owner.signal(signal.SIGTERM)
        if not wait_gone([owner], cluster.cluster.get("stop_within_s", 0) + _KILL_MARGIN_S):
            owner.signal(signal.SIGKILL)
    ended = cluster.remove()
    if cluster.path.exists():
        raise Failure(f"cannot remove {cluster.path}: see what uses it (lsof +D)")
    how = "stopped" if owner is not None else f"removed what was left of it ({len(ended)} processes)"
    click.echo(f"{name}: {how}")


def _only(clusters: list[RunDir]) -> list[RunDir]:
    """Those whose `up` is dead; else the only one. Raises ``WrongUse`` when several run."""
    dead = [cluster for cluster in clusters if cluster.owner() is None]
    if not dead and len(clusters) > 1:
        raise WrongUse(f"{len(clusters)} clusters run here; choose by --url, --ready-file or --all: {_names(clusters)}")
    return dead or clusters


def _names(clusters: list[RunDir]) -> str:
    return ", ".join(cluster.cluster.get("http", f"{cluster.path} (starting)") for cluster in clusters)


def find_url(url: str, clusters: list[RunDir]) -> RunDir:
    """The cluster whose HTTP address this is. Raises ``WrongUse``."""
    for cluster in clusters:
        if cluster.cluster.get("http") == Client(url).url:
            return cluster
    raise WrongUse(
        f"{url}: no cluster of yours here has that address; there is {_names(clusters) or 'none'} "
        "(routers and workers that were started one by one are ended and added the same way)"
    )


def find_ready_file(path: Path, clusters: list[RunDir]) -> RunDir:
    """The cluster that wrote this file; one whose cluster is gone is removed. Raises ``WrongUse``."""
    text = read_text(path, f"--ready-file {path}")
    try:
        run_dir = Path(json.loads(text)["run_dir"])
    except (ValueError, KeyError, TypeError) as error:
        raise WrongUse(f"--ready-file {path}: `warmfront up` has not written this file") from error
    for cluster in clusters:
        if cluster.path == run_dir:
            return cluster
    path.unlink()  # its cluster is gone, and only this file was left
    raise WrongUse(f"the cluster of {path} is gone already; removed the file")
