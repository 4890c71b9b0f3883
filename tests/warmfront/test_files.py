from __future__ import annotations

from pathlib import Path

import pytest

from tests.warmfront.conftest import Cli
from warmfront.errors import WrongUse
from warmfront.files import read_text


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff")
    for name, reason in (
        ("none", "No such file or directory"),
        ("", "Is a directory"),
        ("binary", "no UTF-8 text: byte 2 is 0xff"),
    ):
        with pytest.raises(WrongUse) as refused:
            read_text(tmp_path / name, f"--from {name}")
        assert refused.value.message == f"--from {name}: {reason}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no file of `warmfront controller`"),
        (b"hello", "no file of `warmfront controller`"),
        (b"redis: redis://host:6379/0\n", "its workers are not the controller's"),
        (b"workers: {replicas: 2\nsuffix: x}}\n", "line 2, column 7: "),
        (b"\xff\xfe\xfd", "no UTF-8 text: byte 0 is 0xff"),
    ],
)
def test_a_desired_file_that_is_none_is_refused_with_one_line(
    cli: Cli, tmp_path: Path, content: bytes, words: str
) -> None:
    file = tmp_path / "desired.yaml"
    file.write_bytes(content)
    for command in (("rollout",), ("scale", "3")):
        told = cli(*command, "--desired", str(file))
        assert (told.exit_code, words in told.err, told.err.count("\n")) == (2, True, 1), told.err


def test_a_ready_file_that_is_none_is_refused_with_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "other.json").write_text("[]")
    for name, words in (
        ("none", "No such file or directory"),
        ("", "Is a directory"),
        ("empty", "`warmfront up` has not written this file"),
        ("other.json", "`warmfront up` has not written this file"),
    ):
        for command in ("down", "rollout"):
            told = cli(command, "--ready-file", str(tmp_path / name))
            assert (told.exit_code, words in told.err, told.err.count("\n")) == (2, True, 1), told.err
