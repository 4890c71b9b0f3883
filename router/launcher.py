"""What the controller is told, what it sees, and through whom it acts: plain data, and the interface of a launcher."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from warmfront_pb.v1 import common_pb2

from router.autoscale import Autoscale
from router.reconcile import STARTING, Group

MAX_STRIKES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """What should run. A role that is absent is somebody else's: Kubernetes', say."""

    fleet: str
    redis_url: str = field(repr=False)  # may hold a password
    redis_password_file: Path | None = None
    groups: tuple[Group, ...] = ()
    autoscale: Autoscale | None = None  # of the workers
    suffix: str = ""  # of every worker's name, where other clusters share the fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One part as its launcher sees it now."""

    role: str
    name: str
    revision: str
    pid: int = 0  # 0: not known
    node: str = ""  # its machine, where there may be several
    address: str = ""
    state: str = STARTING  # GONE without a fault: it was drained and has ended
    generation: str = ""
    fault: str = ""  # why it failed, by its own words
    exit_code: int = 0  # with which it then ended
    error: str = ""  # what is wrong with it now; empty: it is well
    not_ready: str = ""  # of a router: why it cannot answer requests, be it that no worker can
    answers: bool = False  # this very look had an answer from the part itself
    is_leaving: bool = False  # its node is being shut down and waits for it to end
    is_restarting: bool = False  # its process is gone and its launcher starts it again
    is_dead: bool = False  # its launcher does not start it again


class Launcher(Protocol):
    """How parts run: as actors of a Ray cluster, or as child processes."""

    def look(self, leases: Mapping[str, common_pb2.ReplicaLease]) -> list[Seen]:
        """Every part of this fleet that runs or has just ended, whoever started it; one just started at once."""
        ...

    def num_nodes(self, group: Group) -> int:
        """Nodes that have what one of its parts takes, and that are not being shut down."""
        ...

    def start(self, group: Group, name: str, revision: str) -> None:
        """Starts a part; it is started again when it dies, until it is removed."""
        ...

    def drain(self, name: str, deadline_s: float) -> None:
        """Takes a part out of service for good; returns at once."""
        ...

    def replace(self, name: str) -> None:
        """Kills the process of a part that hangs and starts it again."""
        ...

    def remove(self, name: str) -> None:
        """Ends what is left of a part, and forgets it."""
        ...


@dataclass(slots=True)
class Health:
    """One part's record of answers. Plain data: the clock is passed in."""

    started_s: float
    boot: int = 0  # its process; 0: not known yet
    has_served: bool = False
    strikes: int = 0
    restarts: int = 0

    def begin_boot(self, now: float, boot: int = 0) -> None:
        """It starts anew, in process ``boot`` once that is known: until it serves it may take its time again."""
        self.started_s, self.boot = now, boot
        self.has_served = False
        self.strikes = 0

    def observe(self, error: str, now: float, start_timeout_s: float) -> bool:
        """Take one look's outcome ("" is well); whether the part must be killed."""
        if not error:
            self.has_served = True
            self.strikes = 0
            return False
        if not self.has_served and now - self.started_s < start_timeout_s:
            return False  # it loads its model
        self.strikes += 1
        if self.strikes < MAX_STRIKES:
            return False
        self.restarts += 1
        self.begin_boot(now)
        return True


def refuses(address: str, timeout_s: float = 1.0) -> bool:
    """Whether nobody listens there any more; a process that hangs or is stopped still does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return False
