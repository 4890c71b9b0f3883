"""The command beside a cluster's controller."""

from __future__ import annotations

from warmfront.controller import Rounds


def test_a_controller_that_hangs_is_dead_for_whoever_asks_and_alive_when_it_comes_round_again() -> None:
    now_s = [100.0]
    rounds = Rounds(lambda: now_s[0])
    now_s[0] += 60.0
    assert rounds.why_dead() == "", "Ray may take a while"
    now_s[0] += 200.0
    assert rounds.why_dead() == "it has looked at nothing for 260 s"
    rounds.come()
    assert rounds.why_dead() == ""
