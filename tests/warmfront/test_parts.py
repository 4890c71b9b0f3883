"""A router or worker in a process of its own leaves at once, with the code that it means and its last words written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import free_port
from warmfront.__main__ import PARTS_GRPC_EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
WORKER = ("worker", "--engine", "simulated", "--model", "bytes", "--replica-id", "w0")
ROUTER = ("router", "--http-port", "0", "--grpc-port", "0")
# What is done at the end of an interpreter that is taken down would tell of it.
PROGRAM = """
import atexit, sys
atexit.register(print, "taken down")
from warmfront.__main__ import main
main()
"""


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a part; none outlives the test."""
    parts: list[subprocess.Popen[str]] = []

    def started(*arguments: str) -> subprocess.Popen[str]:
        part = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        )
        parts.append(part)
        return part

    yield started
    for part in parts:
        part.kill()
        part.wait()


def ended(part: subprocess.Popen[str], until: str | None = None) -> tuple[int, str]:
    """The exit code of a part and its last line; with ``until`` it is told to end as soon as it has said that."""
    assert part.stdout is not None
    with part:
        if until is not None:
            while until not in (line := part.stdout.readline()):
                assert line, f"ended with {part.wait()} before it said {until}"
            part.send_signal(signal.SIGTERM)
        *_, last_line = part.stdout.read().splitlines()
        return part.wait(), last_line


def test_a_part_that_is_told_to_end_leaves_at_once_with_0(start: Start, store: str) -> None:
    parts = [
        (start(*WORKER, "--redis", store), "state=READY", "state=GONE"),
        (start(*ROUTER, "--redis", store, "--drain-notice", "0s"), "router listens", "router drains"),
    ]
    for part, until, last_words in parts:
        code, last_line = ended(part, until)
        assert (code, last_words in last_line) == (0, True), last_line


def test_a_part_that_cannot_start_or_is_refused_leaves_at_once_with_2_and_says_why(start: Start, store: str) -> None:
    port = urlsplit(store).port
    away = f"redis://127.0.0.1:{free_port()}/0"
    with_others = ("--redis", store, "--fleet", "others")
    assert ended(start(*WORKER, *with_others), "state=READY")[0] == 0  # what it has agreed on outlives it
    parts = [
        (start(*WORKER, *with_others, "--block-size", "32"), "exit_code=2: this worker cannot join fleet others"),
        (start(*ROUTER, "--redis", store, "--http-port", str(port)), f"cannot listen on 127.0.0.1:{port} for HTTP"),
        (start(*WORKER, "--redis", away), "exit_code=2: --redis: cannot use Redis"),
        (start(*WORKER, "--redis", store, "--port", str(port)), "exit_code=2: "),
    ]
    for part, last_words in parts:
        code, last_line = ended(part)
        assert (code, last_words in last_line) == (2, True), last_line


def test_grpc_knows_what_the_parts_ask_of_it() -> None:
    env = {**os.environ, "GRPC_EXPERIMENTS": PARTS_GRPC_EXPERIMENTS, "GRPC_VERBOSITY": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", "import grpc.aio"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
    )
    assert (done.returncode, done.stdout) == (0, b"")
