"""What holds for every test."""

from pathlib import Path

import pytest

import worker  # noqa: F401 - before torch is loaded: idle threads shall sleep, as the suite shares its cores
from tests.fakes.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Who issues the certificates of one test."""
    return Authority(tmp_path)
