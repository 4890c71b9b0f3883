from __future__ import annotations

import pytest

from warmfront.starting import step_of, summary

LOG = (
    "time=1 level=INFO logger=worker.main replica=w0 state=STARTING doing='loading weights' percent=40\n"
    "time=2 level=INFO logger=worker.main replica=w0 state=STARTING doing='testing itself'\n"
)
AS_JSON = '{"message": "replica=w0 state=STARTING doing=\'loading weights\' percent=40"}\n'


@pytest.mark.parametrize(
    ("state", "log", "told"),
    [
        ("STARTING", "", "starting"),
        ("STARTING", LOG.splitlines()[0], "loading weights 40 %"),
        ("STARTING", LOG, "testing itself"),
        ("STARTING", AS_JSON, "loading weights 40 %"),
        ("WARMING", LOG, "WARMING"),
    ],
)
def test_a_replica_that_starts_is_told_by_the_last_step_of_its_log(state: str, log: str, told: str) -> None:
    assert step_of(state, log) == told


def test_the_line_counts_who_is_ready_and_names_the_others_while_they_are_few() -> None:
    doing = {"w0": "READY", "w1": "loading weights 40 %", "w2": "starting"}
    assert summary(doing) == "1 of 3 replicas ready: w1 loading weights 40 %, w2 starting"
    assert summary(dict.fromkeys(doing, "READY")) == "3 of 3 replicas ready"
    many = {f"w{number}": f"loading weights {number} %" for number in range(6)} | {"w6": "starting", "w7": "READY"}
    assert summary(many) == "1 of 8 replicas ready: 6 loading weights, 1 starting"
