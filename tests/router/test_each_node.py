"""One router on each node: it comes with its node, and goes in good order when the node is shut down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from router.controller import Controller
from router.launcher import Desired
from router.reconcile import Group, Rollout
from tests.fakes.node_launcher import Node, NodeLauncher

NOBODY = "redis://127.0.0.1:1/0"


def wish(resource: str = "blue", **settings: str) -> Desired:
    placement, rollout = {"resources": {resource: 1}}, Rollout(surge=0)
    group = Group(role="router", count=0, each_node=True, settings=settings, placement=placement, rollout=rollout)
    return Desired(fleet="f", redis_url=NOBODY, groups=(group,))


class Loop:
    """A controller that looks when it is told to."""

    def __init__(self, folder: Path, nodes: dict[str, Node]) -> None:
        self.wish = wish()
        self.launcher = NodeLauncher(nodes)
        self._controller = Controller(lambda: self.wish, lambda _: self.launcher, folder)
        self._controller.stop()  # its own thread

    def look(self, times: int = 4) -> dict[str, str]:
        """The part on each node afterwards."""
        for _ in range(times):
            self._controller.look()
        return {name: node.part for name, node in self.launcher.nodes.items()}


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    return Loop(tmp_path, {"a": Node("blue"), "b": Node("blue"), "head": Node("none")})


def test_each_node_with_the_resource_has_one(loop: Loop) -> None:
    assert loop.look() == {"a": "router-0", "b": "router-1", "head": ""}


def test_a_node_that_joins_gets_one_and_no_other_moves(loop: Loop) -> None:
    loop.look()
    loop.launcher.nodes["c"] = Node("blue")
    assert loop.look() == {"a": "router-0", "b": "router-1", "head": "", "c": "router-2"}
    assert loop.launcher.drained == []


def test_a_node_that_is_shut_down_loses_its_own_and_no_other(loop: Loop) -> None:
    loop.look()
    loop.launcher.nodes["a"].is_leaving = True
    assert loop.look() == {"a": "", "b": "router-1", "head": ""}
    assert loop.launcher.drained == ["router-0"]
    del loop.launcher.nodes["a"]
    loop.launcher.nodes["c"] = Node("blue")
    assert loop.look()["c"] != ""


def test_a_node_that_dies_leaves_nothing_that_waits_for_another(loop: Loop) -> None:
    loop.look()
    del loop.launcher.nodes["a"]
    loop.look()
    assert list(loop.launcher.parts) == ["router-1"]


def test_new_settings_are_rolled_out_in_place(loop: Loop) -> None:
    loop.look()
    loop.wish = wish(policy="random")
    after = loop.look(times=10)
    revisions = [loop.launcher.parts[after[node]][1] for node in ("a", "b")]
    assert revisions == [loop.wish.groups[0].revision] * 2


def test_nodes_of_another_resource_keep_theirs_until_they_are_shut_down(loop: Loop) -> None:
    loop.look()
    loop.wish = wish("green")
    loop.launcher.nodes["c"] = Node("green")
    assert loop.look() == {"a": "router-0", "b": "router-1", "head": "", "c": "router-2"}
    loop.launcher.nodes["a"].is_leaving = True
    assert loop.look()["a"] == ""
    del loop.launcher.nodes["a"], loop.launcher.nodes["b"]  # the second without a word
    loop.look()
    assert list(loop.launcher.parts) == ["router-2"]


def test_the_count_is_that_of_the_nodes(loop: Loop, tmp_path: Path) -> None:
    loop.look()
    assert '"count": 2' in (tmp_path / "status.json").read_text(encoding="utf-8")
    assert replace(loop.wish.groups[0], count=5).revision == loop.wish.groups[0].revision
