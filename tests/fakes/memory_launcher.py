"""A launcher of parts in memory: one is READY at the look after its start, and gone at the look after its drain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from warmfront_pb.v1 import common_pb2

from router.launcher import Seen
from router.reconcile import DRAINING, GONE, READY, STARTING, Group


@dataclass
class MemoryLauncher:
    parts: dict[str, Seen] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)  # by revision: why its parts never become READY
    silent: set[str] = field(default_factory=set)  # parts that never answer
    stays: bool = False  # what drains does not end

    def look(self, leases: Mapping[str, common_pb2.ReplicaLease]) -> list[Seen]:
        """Each part as it is now; then it goes on."""
        seen = list(self.parts.values())
        following = {STARTING: READY, DRAINING: DRAINING if self.stays else GONE}
        for name, one in self.parts.items():
            if name not in self.silent and (not one.fault or one.state == DRAINING):
                self.parts[name] = replace(one, state=following.get(one.state, one.state), fault="")
        return seen

    def num_nodes(self, group: Group) -> int:
        """This process."""
        return 1

    def start(self, group: Group, name: str, revision: str) -> None:
        self.started.append(name)
        self.parts[name] = self._new(group.role, name, revision)

    def drain(self, name: str, deadline_s: float) -> None:
        self.parts[name] = replace(self.parts[name], state=DRAINING)

    def replace(self, name: str) -> None:
        self.replaced.append(name)
        self.parts[name] = self._new(self.parts[name].role, name, self.parts[name].revision)

    def remove(self, name: str) -> None:
        self.parts.pop(name, None)

    def _new(self, role: str, name: str, revision: str) -> Seen:
        answers = name not in self.silent
        fault, error = self.faults.get(revision, ""), "" if answers else "no answer"
        return Seen(role=role, name=name, revision=revision, pid=1, answers=answers, fault=fault, error=error)
