"""The desired state of a running cluster, changed from outside: found, locked, written, and waited for."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from warmfront.client import say_which, several_clusters
from warmfront.desired import DESIRED_FILE, read_status, write_desired
from warmfront.down import find_ready_file, find_url
from warmfront.errors import Failure, WrongUse
from warmfront.files import read_yaml
from warmfront.flags import ENV_PREFIX
from warmfront.run_dir import RunDir, all_run_dirs, write_private
from warmfront.values import FILE, THERE

_LOOK_S = 0.25
_LOCK_FILE = ".desired.lock"
_BEFORE_FILE = ".before-rollout.yaml"
_NO_DESIRED = "no file of `warmfront controller`, which has lines such as `workers: {replicas: 2}`"


@dataclass(frozen=True, slots=True)
class Wishes:
    """One cluster's desired state. ``run_dir`` is that of its `up`, where it has one."""

    path: Path
    state_dir: Path
    run_dir: RunDir | None = None

    def read(self) -> dict[str, Any]:
        """The file's content, keys as they stand there. Raises ``WrongUse``."""
        try:
            content = read_yaml(self.path)
        except ValueError as error:
            raise WrongUse(str(error)) from error
        except OSError as error:
            raise WrongUse(f"{self.path}: {error.strerror}") from error
        if not isinstance(content, dict):
            raise WrongUse(f"{self.path}: {_NO_DESIRED}")
        if not isinstance(content.get("workers"), dict):
            raise WrongUse(
                f"{self.path}: its workers are not the controller's; whoever places them scales and rolls them"
            )
        return content

    def write(self, content: dict[str, Any]) -> None:
        """Writes it. Raises ``WrongUse`` when it would be refused, or cannot be written."""
        try:
            write_desired(self.path, content)
        except ValueError as error:
            raise WrongUse(str(error)) from error
        except OSError as error:
            raise WrongUse(
                f"{self.path} cannot be written ({error.strerror}): change it where it comes from"
            ) from error

    # What a rollout changed may have to be taken back, also by a command that comes after the one that began it.

    def keep_before(self, content: dict[str, Any]) -> None:
        """Notes what was wanted before a rollout, until ``forget_before``. Raises ``WrongUse``."""
        try:
            write_private(self.state_dir / _BEFORE_FILE, yaml.safe_dump(content, sort_keys=False))
        except OSError as error:
            raise WrongUse(f"{self.state_dir} cannot be written to: {error.strerror}") from error

    def before(self) -> dict[str, Any] | None:
        """What was wanted before a rollout whose end no command has seen."""
        try:
            content = read_yaml(self.state_dir / _BEFORE_FILE)
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) and isinstance(content.get("workers"), dict) else None

    def forget_before(self) -> None:
        """The rollout has ended."""
        (self.state_dir / _BEFORE_FILE).unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """What the controller has last told. Raises ``Failure`` when the cluster has ended."""
        if self.run_dir is not None and self.run_dir.owner() is None:
            raise Failure("the cluster has ended")
        return read_status(self.state_dir)

    def workers(self) -> dict[str, Any]:
        """What it told of the workers; empty before it has told anything."""
        group: dict[str, Any] = self.status().get("groups", {}).get("worker", {})
        return group

    def parts(self) -> list[dict[str, Any]]:
        """The workers that run."""
        return [part for part in self.status().get("parts", ()) if part["role"] == "worker"]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For one command at a time. Raises ``WrongUse`` when another one is at it."""
        try:
            descriptor = os.open(self.state_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise WrongUse(f"{self.state_dir} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise WrongUse("another scale or rollout of this cluster is under way: wait for it") from error
        finally:
            os.close(descriptor)


def wait(look: Callable[[], bool], deadline_s: float) -> bool:
    """Whether ``look`` came true before the deadline."""
    end = time.monotonic() + deadline_s
    while not look():
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True


def key_of(values: dict[str, Any], name: str) -> str:
    """How a file spells ``name``: with dashes or underscores."""
    return next((key for key in values if str(key).replace("-", "_") == name), name)


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which cluster; ``find`` takes them."""
    options = (
        click.option("--ready-file", type=FILE, help="The `up` that wrote this file."),
        click.option("--url", help=f"The `up` whose HTTP address this is. Default: {ENV_PREFIX}URL."),
        click.option(
            "--desired",
            "desired_file",
            type=THERE,
            help="The file of a `warmfront controller`.",
        ),
        click.option(
            "--state-dir", type=click.Path(file_okay=False, path_type=Path), help="Its folder, if not the file's."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def find(*, ready_file: Path | None, url: str | None, desired_file: Path | None, state_dir: Path | None) -> Wishes:
    """The cluster that is meant: by default that of WARMFRONT_URL, else the only `up` here, which is then told.

    Raises ``WrongUse``.
    """
    if sum(one is not None for one in (ready_file, url, desired_file)) > 1:
        raise WrongUse("give --ready-file, --url or --desired, not two of them")
    if desired_file is not None:
        return Wishes(desired_file.absolute(), (state_dir or desired_file.absolute().parent).absolute())
    url = url or os.environ.get(ENV_PREFIX + "URL")  # no option's default: it gives way to the others
    running = [run_dir for run_dir in all_run_dirs() if run_dir.owner() and run_dir.cluster]
    if ready_file is not None:
        run_dir = find_ready_file(ready_file, all_run_dirs())
    elif url is not None:
        run_dir = find_url(url, all_run_dirs())
    elif not running:
        raise WrongUse("no cluster of yours runs here; name a controller's file with --desired")
    elif len(running) == 1:
        (run_dir,) = running
        say_which(run_dir.cluster.get("http", ""))
    else:
        raise several_clusters([one.cluster.get("http", "") for one in running])
    return Wishes(run_dir.path / DESIRED_FILE, run_dir.path, run_dir)
