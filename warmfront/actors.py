"""Routers and workers as Ray actors, for the controller. Ray places, restarts and ends them; no request passes through.

Flags reach an actor, secrets do not: each part reads token, seed and, where the file of the desired state names none,
the Redis URL on its own node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from common.logs import configure_logging
from router.actor import RouterActor
from router.config import RouterConfig
from router.controller import Controller
from router.launcher import Desired, Seen, refuses
from router.reconcile import DRAINING, GONE, READY, Group
from router.worker_client import is_serving
from warmfront.desired import REDIS_ENV, as_params, own_ports, read_desired
from warmfront.options import fill
from worker.actor import WorkerActor
from worker.config import WorkerConfig

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from warmfront_pb.v1 import common_pb2

CONTROLLER = "controller"
_PING_DEADLINE_S = 3.0
_ADOPT_DEADLINE_S = 10.0
_DEAD_WORD = "INTENDED_USER_EXIT"  # Ray's for exit_actor
_EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104
_GONE_WORDS = "its process is gone, Ray starts it again"

MakeConfig: TypeAlias = Callable[[str, Mapping[str, Any]], Any]  # from a part's name and flags, on its own node


def router_config(name: str, settings: Mapping[str, Any]) -> RouterConfig:
    """A router's configuration, made on its own node. Raises ``WrongUse``."""
    return fill(RouterConfig, as_params(_on_this_node({**settings, **own_ports(name, settings)})), router_id=name)


def worker_config(name: str, settings: Mapping[str, Any]) -> WorkerConfig:
    """A worker's configuration, made on its own node: where it listens everywhere, it tells that node's address."""
    flags = _on_this_node(settings)
    if flags.get("listen") in _EVERYWHERE and not flags.get("advertise"):
        flags["advertise"] = ray.util.get_node_ip_address()
    return fill(WorkerConfig, as_params(flags), replica_id=name)


def _on_this_node(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**settings, "redis": settings.get("redis") or os.environ.get(REDIS_ENV, "")}


@dataclass(slots=True)
class _Actor:
    role: str
    revision: str
    handle: Any
    address: str = ""  # of its server, when it last answered
    has_answered: bool = False
    has_tls: bool = False


class RayLauncher:
    """Parts as detached actors named ``fleet/role/name/revision``, so that whoever comes later finds them."""

    def __init__(self, desired: Desired, kinds: Mapping[str, tuple[type, MakeConfig]] | None = None) -> None:
        """``kinds``: the actor of each role and what makes its configuration, where they are not the usual ones."""
        self._fleet = desired.fleet
        self._kinds = kinds or {"router": (RouterActor, router_config), "worker": (WorkerActor, worker_config)}
        self._actors: dict[str, _Actor] = {}
        self._nodes: list[dict[str, float]] = []  # what each has that stays
        self._strangers: set[str] = set()  # parts of other fleets that were drained
        self._health_calls = ThreadPoolExecutor(8, thread_name_prefix="health")

    def look(self, leases: Mapping[str, common_pb2.ReplicaLease]) -> list[Seen]:
        """Asks every actor of this fleet, and the server of each worker."""
        leaving = _leaving_nodes()
        if leaving:
            self._drain_strangers(leaving)
        self._nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving]
        for full_name in ray.util.list_named_actors():
            fleet, _, rest = full_name.partition("/")
            if fleet == self._fleet and rest.count("/") == 2:
                role, name, revision = rest.split("/")
                if name not in self._actors:
                    with contextlib.suppress(ValueError):  # it has ended meanwhile
                        self._actors[name] = _Actor(role, revision, ray.get_actor(full_name))
        pings = {name: actor.handle.ping.remote() for name, actor in self._actors.items()}
        if pings:
            ray.wait(list(pings.values()), num_returns=len(pings), timeout=_PING_DEADLINE_S)
        seen = [self._seen(name, self._actors[name], ping, leaving) for name, ping in pings.items()]
        return list(self._health_calls.map(self._with_health, seen))

    def _drain_strangers(self, leaving: Collection[str]) -> None:
        """Parts, on nodes that are shut down, of fleets without a controller: one was replaced by this one, say."""
        names = ray.util.list_named_actors()
        watched = {self._fleet, *(name.partition("/")[0] for name in names if name.endswith(f"/{CONTROLLER}"))}
        pings = {}
        for name in names:
            if name.count("/") == 3 and name.partition("/")[0] not in watched:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    actor: Any = ray.get_actor(name)
                    pings[name] = (actor, actor.ping.remote())
        for name, (actor, ping) in pings.items():
            with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                if ray.get(ping, timeout=_PING_DEADLINE_S).get("node") in leaving and name not in self._strangers:
                    log.info("node is shut down, a part of another fleet drains part=%s", name)
                    self._strangers.add(name)
                    actor.drain.remote()

    def num_nodes(self, group: Group) -> int:
        """Nodes with all resources of its placement, as of the last look."""
        wanted = group.placement.get("resources", {})
        return sum(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in self._nodes)

    def start(self, group: Group, name: str, revision: str) -> None:
        """Ray places it where its resources are, workers spread over nodes; it waits where there are none."""
        actor, make_config = self._kinds[group.role]
        options = {
            "name": f"{self._fleet}/{group.role}/{name}/{revision}",
            "get_if_exists": True,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": 4,  # a ping is answered while it drains
            "scheduling_strategy": "SPREAD",
            **{key: value for key, value in group.placement.items() if value},
        }
        options.setdefault("num_cpus", 0)
        handle: Any = ray.remote(actor).options(**options).remote(partial(make_config, name, dict(group.settings)))
        self._actors[name] = _Actor(group.role, revision, handle)

    def drain(self, name: str, deadline_s: float) -> None:
        """One that has never answered has nothing to end."""
        actor = self._actors[name]
        if not actor.has_answered:
            _kill(actor.handle, for_good=True)
        elif actor.role == "router":
            actor.handle.drain.remote()
        else:
            actor.handle.drain.remote(deadline_s)

    def replace(self, name: str) -> None:
        """Ray starts it again."""
        _kill(self._actors[name].handle, for_good=False)

    def remove(self, name: str) -> None:
        """Ray does not start it again."""
        if (actor := self._actors.pop(name, None)) is not None:
            _kill(actor.handle, for_good=True)

    def _seen(self, name: str, actor: _Actor, ping: Any, leaving: Collection[str]) -> Seen:
        seen = partial(Seen, role=actor.role, name=name, revision=actor.revision, address=actor.address)
        try:
            answer: dict[str, Any] = ray.get(ping, timeout=0)
        except ray.exceptions.GetTimeoutError:
            if refuses(actor.address):  # Ray keeps calls back while it starts an actor again
                return seen(is_restarting=True, error=_GONE_WORDS)
            return seen(error=f"no answer to ping within {_PING_DEADLINE_S:g} s")
        except ray.exceptions.ActorDiedError as error:
            if _DEAD_WORD in str(error):
                return seen(state=GONE)
            return seen(state=GONE, is_dead=True, fault=f"its actor died: {cause_of(error)}")
        except ray.exceptions.ActorUnavailableError:
            return seen(is_restarting=True, error=_GONE_WORDS)
        except ray.exceptions.RayError as error:
            return seen(error=f"ping failed: {type(error).__name__}")
        actor.address, actor.has_answered = answer.get("address", ""), True
        actor.has_tls = answer.get("has_tls", False)
        return Seen(
            role=actor.role,
            name=name,
            revision=actor.revision,
            pid=answer["pid"],
            node=answer.get("node", ""),
            address=actor.address,
            state=answer.get("state", READY),
            generation=answer.get("generation", ""),
            fault=answer.get("fault", ""),
            exit_code=answer.get("exit_code", 0),
            error=answer.get("error", ""),
            not_ready=answer.get("not_ready", ""),
            answers=True,
            is_leaving=answer.get("node") in leaving,
        )

    def _with_health(self, seen: Seen) -> Seen:
        """With what the worker's server says; one with TLS is only asked for a connection, lacking a certificate."""
        if seen.role != "worker" or not seen.answers or seen.error or seen.state in (DRAINING, GONE):
            return seen
        if not seen.address:
            return replace(seen, error="its server does not listen yet")
        if self._actors[seen.name].has_tls:
            is_well = seen.state == READY and not refuses(seen.address)
        else:
            is_well = is_serving(seen.address, _PING_DEADLINE_S)
        return seen if is_well else replace(seen, error=f"its server at {seen.address} is not healthy")


class ControllerActor:
    """The control loop in an actor on the node of its files. Make it by ``start_controller``."""

    def __init__(self, desired_file: Path, state_dir: Path) -> None:
        configure_logging(as_json=False, level="INFO")
        self._files = [str(desired_file), str(state_dir)]
        self._controller = Controller(partial(read_desired, desired_file), RayLauncher, state_dir)

    def ping(self) -> dict[str, Any]:
        """Proof of life: whether the loop goes on, which files it works with, on which node."""
        node = ray.get_runtime_context().get_node_id()
        return {"is_alive": self._controller.is_alive(), "pid": os.getpid(), "files": self._files, "node": node}

    def stop(self) -> None:
        """Stop watching; the parts go on."""
        self._controller.stop()


def start_controller(desired_file: Path, state_dir: Path, fleet: str) -> Any:
    """A fleet's controller on this node: the one that runs where it works with these files, else a new one.

    Ray starts it again when it dies, and it adopts what runs.
    """
    name, here = f"{fleet}/{CONTROLLER}", ray.get_runtime_context().get_node_id()
    with contextlib.suppress(ValueError):
        found: Any = ray.get_actor(name)
        answer = _answer_of(found)
        if answer.get("is_alive") and answer["node"] == here and answer["files"] == [str(desired_file), str(state_dir)]:
            return found
        _kill(found, for_good=True)
        end = time.monotonic() + _ADOPT_DEADLINE_S
        while time.monotonic() < end and name in ray.util.list_named_actors():  # Ray frees the name a moment later
            time.sleep(0.1)
    options = {
        "name": name,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 4,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }
    return ray.remote(ControllerActor).options(**options).remote(desired_file, state_dir)


def _answer_of(controller: Any) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = ray.get(controller.ping.remote(), timeout=_ADOPT_DEADLINE_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        return {}
    return answer


def actors_of(role: str) -> list[Any]:
    """The handles of every actor of one role in this namespace."""
    found = []
    for name in ray.util.list_named_actors():
        if name.split("/")[1:2] == [role]:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                found.append(ray.get_actor(name))
    return found


def _leaving_nodes() -> Collection[str]:
    """Ids of the nodes that have begun to shut down: `ray start` drains its node when it gets SIGTERM."""
    worker: Any = ray._private.worker.global_worker  # Serve asks it the same; Ray has no public call for that
    nodes: Collection[str] = worker.gcs_client.get_draining_nodes(timeout=_PING_DEADLINE_S)
    return nodes


def _kill(handle: Any, *, for_good: bool) -> None:
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(handle, no_restart=for_good)


def cause_of(error: Exception) -> str:
    """What really went wrong inside an actor: the last line of Ray's long story."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
