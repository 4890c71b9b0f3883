"""``warmfront controller``: routers and workers on a Ray cluster, as a file says, for as long as the file says so."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from prometheus_client import CollectorRegistry, Gauge

from common.logs import configure_logging
from common.metrics_server import MetricsServer
from router.launcher import Desired
from warmfront.desired import read_desired, read_status
from warmfront.errors import Failure, WrongUse
from warmfront.flags import ENV_PREFIX
from warmfront.preflight import check_folder
from warmfront.run_dir import RunDir
from warmfront.values import PORT, THERE

log = logging.getLogger("warmfront.controller")

_LOOK_S = 1.0
_STUCK_S = 180.0  # six times the longest answer that a look waits for; Ray's own calls have no limit
_DRAIN_MARGIN_S = 15.0
_PREFIX = "warmfront_controller"


@click.command()
@click.option(
    "--desired",
    "desired_file",
    required=True,
    type=THERE,
    envvar=ENV_PREFIX + "DESIRED",
    help="YAML file of what should run; read again when it changes.",
)
@click.option(
    "--ray-address",
    required=True,
    envvar=ENV_PREFIX + "RAY_ADDRESS",
    help="HOST:PORT of the Ray cluster, auto for the one of this machine, local for one that ends with the command.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=ENV_PREFIX + "STATE_DIR",
    help="Folder for status.json and memory.json. Default: that of the desired file.",
)
@click.option("--metrics-port", type=PORT, envvar=ENV_PREFIX + "METRICS_PORT", help="Port of /metrics. Default: off.")
@click.option("--listen", default="127.0.0.1", show_default=True, envvar=ENV_PREFIX + "LISTEN", help="Its address.")
@click.option("--log-json", is_flag=True, envvar=ENV_PREFIX + "LOG_JSON", help="Logs as JSON lines.")
def controller(
    *,
    desired_file: Path,
    ray_address: str,
    state_dir: Path | None,
    metrics_port: int | None,
    listen: str,
    log_json: bool,
) -> None:
    """Run routers and workers on a Ray cluster as a file says; see docs/deploy.md for its form.

    The loop itself is an actor, which Ray starts again when it dies; this command starts or adopts it, tells what
    changes, and serves its metrics. SIGTERM ends the command alone: routers and workers go on, and the next one adopts
    them. To end those, set their counts to 0.
    """
    configure_logging(as_json=log_json, level="INFO")
    try:
        desired = read_desired(desired_file)
    except (ValueError, OSError) as error:
        raise WrongUse(str(error)) from error
    state_dir = (state_dir or desired_file.absolute().parent).absolute()
    check_folder(state_dir, "--state-dir")
    stop = threading.Event()
    with _ray(ray_address):
        from warmfront.actors import start_controller

        for number in (signal.SIGTERM, signal.SIGINT):  # not earlier: Ray takes SIGTERM for itself when it starts
            signal.signal(number, lambda *_: stop.set())
        metrics, rounds = ControllerMetrics(), Rounds()
        if metrics_port is not None:
            try:
                MetricsServer(metrics.registry, str, rounds.why_dead, address=listen, port=metrics_port)
            except OSError as error:
                raise WrongUse(f"--metrics-port {metrics_port}: {error.strerror}") from error
        make = partial(start_controller, desired_file.absolute(), state_dir, desired.fleet)
        actor = make()
        _follow(actor, make, state_dir, metrics, rounds, stop)
        if ray_address == "local":
            _end_parts(desired)


class ControllerMetrics:
    """What the controller's status says, as gauges."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

        self._wanted = gauge("parts_wanted", "Routers and workers that should run.", ("role",))
        self._ready = gauge("parts_ready", "Those of them that are READY.", ("role",))
        self._restarts = gauge("parts_restarts", "Times that those of now were ended because they hung.", ("role",))
        self._rollout_failed = gauge("rollout_failed", "1 while the wanted settings are those that failed.", ("role",))
        self._desired_refused = gauge("desired_refused", "1 while the file of the desired state is refused.")
        self._waiting_s = gauge("waiting_seconds", "Prefill that waits in the fleet, in seconds of one worker's work.")
        self._work = gauge("work", "The fleet's load in workers: how many it needs at least.")

    def take(self, status: dict[str, Any]) -> None:
        """Follow a status as ``status.json`` has it."""
        for role, group in status.get("groups", {}).items():
            self._wanted.labels(role).set(group["count"] - len(group["held_out"]))
            self._ready.labels(role).set(group["ready"])
            parts = [part for part in status["parts"] if part["role"] == role]
            self._restarts.labels(role).set(sum(part["restarts"] for part in parts))
            failed = group["phase"] in ("rolling back", "rolled back", "halted")
            self._rollout_failed.labels(role).set(failed)
        self._desired_refused.set(bool(status.get("desired_error")))
        self._waiting_s.set(status.get("signal", {}).get("waiting_s", 0))
        self._work.set(status.get("signal", {}).get("work", 0))


class Rounds:
    """When ``_follow`` last came round, for whoever asks from another thread: a command that hangs keeps its ports."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at_s = clock()

    def come(self) -> None:
        """Once more."""
        self._at_s = self._clock()

    def why_dead(self) -> str:
        """Empty while it comes round."""
        age_s = self._clock() - self._at_s
        return f"it has looked at nothing for {age_s:.0f} s" if age_s > _STUCK_S else ""


def _follow(
    actor: Any,
    make: Callable[[], Any],
    state_dir: Path,
    metrics: ControllerMetrics,
    rounds: Rounds,
    stop: threading.Event,
) -> None:
    """Tells what changes until ``stop``. Makes the actor anew where Ray does not; raises when Ray itself is away."""
    import ray

    told: dict[str, Any] = {}
    while not stop.wait(_LOOK_S):
        rounds.come()
        try:
            ray.get(actor.ping.remote(), timeout=30)
        except ray.exceptions.ActorDiedError:
            log.warning("the controller has ended for good, making another")
            actor = make()
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
            log.warning("the controller does not answer, Ray starts it again")
        except ray.exceptions.RayError as error:
            raise Failure(f"lost the Ray cluster: {type(error).__name__}") from error
        status = read_status(state_dir)
        metrics.take(status)
        for line in changes(told, status):
            log.info("%s", line)
        told = status


def changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What a status says that the one before did not, in lines for a log."""
    if now.get("desired_error") and now["desired_error"] != before.get("desired_error"):
        yield f"desired_error={now['desired_error']!r}"
    for role, group in now.get("groups", {}).items():
        told = {key: group[key] for key in ("phase", "revision", "count", "ready", "why")}
        if told != {key: before.get("groups", {}).get(role, {}).get(key) for key in told}:
            yield f"role={role} " + " ".join(f"{key}={value!r}" for key, value in told.items() if value != "")
    states = {part["name"]: (part["state"], part["fault"]) for part in before.get("parts", ())}
    for part in now.get("parts", ()):
        if states.get(part["name"]) != (part["state"], part["fault"]):
            fault = f" fault={part['fault']!r}" if part["fault"] else ""
            yield f"part={part['name']} state={part['state']} revision={part['revision']}{fault}"


@contextmanager
def _ray(address: str) -> Iterator[None]:
    """Joins the Ray cluster at ``address``, or starts one for the length of the block. Raises ``WrongUse``."""
    from warmfront.cluster import NAMESPACE, join_ray, start_local_ray

    if address != "local":
        join_ray(address, NAMESPACE)
        yield
        return
    run_dir = RunDir.create()
    try:
        start_local_ray(run_dir.path / "ray", run_dir.path / "ray-token", {}, run_dir.path / "ray.log")
        yield
    finally:
        import ray

        ray.shutdown()
        run_dir.remove()


def _end_parts(desired: Desired) -> None:
    """Drains what ends with this command's own Ray."""
    import ray

    from warmfront.actors import actors_of

    for group in desired.groups:
        drains = [actor.drain.remote() for actor in actors_of(group.role)]
        if drains:
            ray.wait(drains, num_returns=len(drains), timeout=group.drain_s + _DRAIN_MARGIN_S)
