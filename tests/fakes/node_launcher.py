"""A launcher of routers on nodes in memory: each node holds one part, which is READY once it has a place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from warmfront_pb.v1 import common_pb2

from router.launcher import Seen
from router.reconcile import GONE, READY, STARTING, Group


@dataclass
class Node:
    """A machine with one resource, of which a part takes all."""

    resource: str
    is_leaving: bool = False
    part: str = ""


@dataclass
class NodeLauncher:
    """Nodes and parts; a part that drains has ended by the next look."""

    nodes: dict[str, Node]
    parts: dict[str, tuple[Group, str]] = field(default_factory=dict)  # group and revision by name
    drained: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    def look(self, leases: Mapping[str, common_pb2.ReplicaLease]) -> list[Seen]:
        """Places what waits for a node, then tells."""
        for name, (group, _) in self.parts.items():
            if self._node_of(name) is None and name not in self.gone:
                for node in self.nodes.values():
                    if node.resource in group.placement["resources"] and not node.part and not node.is_leaving:
                        node.part = name
                        break
        return [self._seen(name) for name in self.parts]

    def num_nodes(self, group: Group) -> int:
        """Those that stay and have its resource."""
        wanted = group.placement["resources"]
        return sum(node.resource in wanted and not node.is_leaving for node in self.nodes.values())

    def start(self, group: Group, name: str, revision: str) -> None:
        """It gets a place at the next look."""
        self.parts[name] = (group, revision)
        self.gone.discard(name)

    def drain(self, name: str, deadline_s: float) -> None:
        """Its place is free at once."""
        self.drained.append(name)
        self.gone.add(name)
        if (node := self._node_of(name)) is not None:
            node.part = ""

    def replace(self, name: str) -> None:
        """Nothing hangs here."""

    def remove(self, name: str) -> None:
        """Forgets it."""
        if (node := self._node_of(name)) is not None:
            node.part = ""
        self.parts.pop(name, None)

    def _node_of(self, name: str) -> Node | None:
        return next((node for node in self.nodes.values() if node.part == name), None)

    def _seen(self, name: str) -> Seen:
        group, revision = self.parts[name]
        node = self._node_of(name)
        state = GONE if name in self.gone else READY if node is not None else STARTING
        return Seen(
            role=group.role,
            name=name,
            revision=revision,
            state=state,
            answers=node is not None,
            is_restarting=state == STARTING,
            is_leaving=node is not None and node.is_leaving,
        )
