"""What holds for every test."""

import signal
from pathlib import Path

import pytest

import worker  # noqa: F401 - before torch is loaded: idle threads shall sleep, as the suite shares its cores
from tests.fakes.authority import Authority


def pytest_collection_finish() -> None:
    """Ctrl-C is pytest's again: the command line, once imported, leaves it to its default action."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Who issues the certificates of one test."""
    return Authority(tmp_path)
