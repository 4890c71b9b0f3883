from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

import pytest

from tests.support import free_port
from tests.warmfront.conftest import Cli
from warmfront.flags import UpConfig
from warmfront.preflight import on_as_many_gpus
from warmfront.processes import LONGEST_BACKOFF_S, backoff_s
from warmfront.run_dir import RUN_DIR_ENV, RunDir, all_run_dirs
from warmfront.shown import typed_command
from warmfront.store import EmbeddedValkey, check_redis

PORTS = ("--http-port", "0", "--grpc-port", "0")


@pytest.mark.parametrize("reuse_port", [False, True])
@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_port_in_use_ends_with_2_even_when_its_owner_would_share_it(cli: Cli, flag: str, reuse_port: bool) -> None:
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        result = cli("up", *PORTS, flag, str(port))
    assert (result.exit_code, result.out) == (2, "")
    assert result.err == f"warmfront: {flag} {port}: Address already in use on 127.0.0.1; choose another one\n"
    assert all_run_dirs() == []


def test_every_metrics_port_is_probed(cli: Cli) -> None:
    with two_ports_in_a_row() as owner:
        port = owner.getsockname()[1]
        result = cli("up", *PORTS, "--routers", "1", "--replicas", "1", "--metrics-port", str(port - 1))
    assert (result.exit_code, f"--metrics-port {port}" in result.err) == (2, True), result.err


def two_ports_in_a_row() -> socket.socket:
    """Holds a port of which the one before is free."""
    while True:
        owner = socket.create_server(("127.0.0.1", 0))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", owner.getsockname()[1] - 1)):
            return owner
        owner.close()


def test_a_missing_model_ends_with_2_and_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "weights.bin").touch()
    for name, words in (("none", "no such file"), ("folder", "config.json"), ("weights.bin", "neither")):
        result = cli("up", *PORTS, "--model", str(tmp_path / name))
        assert (result.exit_code, words in result.err, result.err.count("\n")) == (2, True, 1), result.err
    assert all_run_dirs() == []


def test_a_redis_that_does_not_answer_ends_with_2_and_one_line(cli: Cli) -> None:
    for url, words in (
        (f"redis://:secret-word@127.0.0.1:{free_port()}/0", "no Redis answers at redis://:***@127.0.0.1"),
        ("http://127.0.0.1:1", "--redis"),
        ("redis+cluster://127.0.0.1:1", "no Redis answers at redis+cluster://127.0.0.1:1"),
    ):
        result = cli("up", *PORTS, "--redis", url)
        assert (result.exit_code, words in result.err, result.err.count("\n")) == (2, True, 1), result.err
        assert "secret-word" not in result.err
    assert all_run_dirs() == []


def test_a_place_that_cannot_be_written_to_is_refused_before_anything_starts(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for flag, path in (("--log-dir", "file"), ("--ready-file", "file/ready.json")):
        result = cli("up", *PORTS, flag, str(tmp_path / path))
        assert (result.exit_code, f"{flag}: cannot make" in result.err, result.err.count("\n")) == (2, True, 1)


def test_places_and_ports_that_cannot_be_are_refused_with_one_line(cli: Cli, tmp_path: Path) -> None:
    port = free_port()
    for arguments, words in (
        (("--ready-file", "/proc/ready.json"), "/proc cannot be written to"),
        (("--ready-file", str(tmp_path)), "is a folder"),
        (("--metrics-port", "65535"), "65535 is the last"),
        (("--http-port", str(port), "--metrics-port", str(port)), f"--metrics-port {port}: --http-port takes that one"),
    ):
        result = cli("up", *PORTS, "--engine", "simulated", *arguments)
        assert (result.exit_code, words in result.err, result.err.count("\n")) == (2, True, 1), result.err
    assert all_run_dirs() == []


def test_a_password_among_the_arguments_is_warned_of_and_never_printed(cli: Cli, tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://user:hush@127.0.0.1:{port}/0"
    worker = cli("worker", "--engine", "simulated", "--model", "bytes", "--redis", url)
    assert worker.exit_code == 2
    assert "every user of this machine can read the password in --redis: use --redis-password-file" in worker.err
    assert "hush" not in worker.err
    secret = tmp_path / "password"
    secret.write_text("hush")
    both = cli("up", *PORTS, "--engine", "simulated", "--redis", url, "--redis-password-file", str(secret))
    assert (both.exit_code, "give one of them" in both.err, "hush" in both.err) == (2, True, False)
    alone = cli("up", *PORTS, "--engine", "simulated", "--redis-password-file", str(secret))
    assert (alone.exit_code, "--redis-password-file needs --redis" in alone.err) == (2, True)


def test_settings_that_contradict_each_other_end_with_2(cli: Cli) -> None:
    for arguments, words in (
        (("--lease", "1s", "--heartbeat", "1s"), "--lease"),
        (("--listen", "0.0.0.0"), "--insecure-listen"),
        (("--tls-cert", "x"), "--tls-cert needs --tls-key"),
        (("--tls-cert", "/nowhere", "--tls-key", "/nowhere"), "--tls-cert /nowhere cannot be read"),
    ):
        result = cli("up", *PORTS, *arguments)
        assert (result.exit_code, words in result.err) == (2, True), result.err


def test_the_embedded_valkey_is_private_and_ends_with_its_cluster(temp_root: Path) -> None:
    run_dir = RunDir.create()
    valkey = EmbeddedValkey(run_dir.path, {RUN_DIR_ENV: str(run_dir.path)})
    check_redis(valkey.url)
    arguments = Path(f"/proc/{valkey.pid}/cmdline").read_bytes().decode()
    password = valkey.url.split("@")[0].rpartition(":")[2]
    assert password not in arguments
    with pytest.raises(Exception, match="Redis refuses us"):
        check_redis(f"redis://127.0.0.1:{valkey.port}/0")  # without the password
    for path in run_dir.path.rglob("*"):
        assert path.is_dir() or password not in path.read_text() or path.stat().st_mode & 0o077 == 0, path
    assert valkey.pid in {process.pid for process in run_dir.remove()}
    assert not run_dir.path.exists()
    valkey.stop()  # waits for the last of its threads
    assert not valkey.is_running()
    assert RunDir.load(run_dir.path) is None


def test_the_command_that_up_names_can_be_typed(temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_dir = temp_root / ".venv" / "bin"
    bin_dir.mkdir(parents=True)
    for name in ("python", "warmfront"):
        (bin_dir / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(bin_dir / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert typed_command() == str(bin_dir / "warmfront")
    monkeypatch.chdir(temp_root)
    assert typed_command() == ".venv/bin/warmfront"
    monkeypatch.setenv("PATH", str(bin_dir))
    assert typed_command() == "warmfront"
    (bin_dir / "warmfront").unlink()
    assert typed_command() == f"{bin_dir}/python -m warmfront"


def test_restarts_wait_longer_each_time() -> None:
    assert [backoff_s(failures) for failures in (1, 2, 3, 4)] == [0.5, 1, 2, 4]
    assert backoff_s(50) == LONGEST_BACKOFF_S


@pytest.mark.parametrize(
    ("visible", "device", "engine", "expected"),
    [("0", "auto", "model", 1), ("0,1,2", "auto", "model", 2), ("0", "cpu", "model", 2), ("0", "auto", "simulated", 2)],
)
def test_where_nobody_says_how_many_there_are_no_more_replicas_than_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str, device: str, engine: str, expected: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert on_as_many_gpus(UpConfig(), {"device": device, "engine": engine}).replicas == expected
