from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from router.config import RouterConfig
from tests.warmfront.conftest import Cli
from warmfront.errors import WrongUse
from warmfront.flags import CONFIGS, FLAGS, default_of, flags_of
from warmfront.options import fill
from warmfront.values import Duration, Number, format_duration, mask_url
from worker.config import WorkerConfig

REDIS = ("--redis", "redis://127.0.0.1:1/0")


def row(shown: str, flag: str) -> list[str]:
    return next(line.split(maxsplit=2) for line in shown.splitlines() if line.split()[0] == flag)


def test_a_default_is_the_dataclass_s(cli: Cli) -> None:
    assert row(cli("config", "show", "worker").out, "--block-size") == ["--block-size", "16", "default"]
    assert WorkerConfig.__dataclass_fields__["block_size"].default == 16


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "warmfront.yaml"
    file.write_text("kv-blocks: 30\nblock-size: 32\nlease: 9s\n")
    monkeypatch.setenv("WARMFRONT_KV_BLOCKS", "20")
    monkeypatch.setenv("WARMFRONT_BLOCK_SIZE", "64")
    shown = cli("config", "show", "worker", "--config", str(file), "--block-size", "128").out
    assert row(shown, "--block-size") == ["--block-size", "128", "command line"]
    assert row(shown, "--kv-blocks") == ["--kv-blocks", "20", "environment WARMFRONT_KV_BLOCKS"]
    assert row(shown, "--lease") == ["--lease", "9s", f"file {file}"]
    assert row(shown, "--heartbeat") == ["--heartbeat", "1s", "default"]


def test_one_file_serves_up_router_and_worker(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "warmfront.yaml"
    file.write_text("replicas: 3\nkv-blocks: 30\npolicy: random\nno-such: 1\n")
    wrong = cli("config", "show", "up", "--config", str(file))
    assert (wrong.exit_code, "no such flag: no-such" in wrong.err) == (2, True)
    file.write_text("replicas: 3\nkv-blocks: 30\npolicy: random\nenable-prefix-caching: false\n")
    for command, flag in (("up", "--replicas"), ("worker", "--kv-blocks"), ("router", "--policy")):
        assert row(cli("config", "show", command, "--config", str(file)).out, flag)[2] == f"file {file}"
    assert row(cli("config", "show", "worker", "--config", str(file)).out, "--enable-prefix-caching")[1] == "false"


def test_a_switch_is_set_from_the_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFRONT_ENABLE_PREFIX_CACHING", "false")
    assert row(cli("config", "show", "worker").out, "--enable-prefix-caching")[1] == "false"


def test_a_variable_that_is_no_setting_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFRONT_KV_BLOKS", "3")
    monkeypatch.setenv("WARMFRONT_ROUTER_SERVICE_HOST", "10.0.0.1")  # Kubernetes tells of a Service that way
    monkeypatch.setenv("WARMFRONT_ROUTER_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    told = cli("config", "show", "worker").err
    assert told == "warmfront: WARMFRONT_KV_BLOKS is no setting and changes nothing; is WARMFRONT_KV_BLOCKS meant?\n"


def test_config_show_alone_shows_up(cli: Cli) -> None:
    assert cli("config", "show").out == cli("config", "show", "up").out


def test_secrets_are_masked(cli: Cli) -> None:
    shown = cli("config", "show", "up", "--redis", "redis://me:very-secret@host:6379/0").out
    assert "very-secret" not in shown
    assert row(shown, "--redis")[1] == "redis://me:***@host:6379/0"
    assert mask_url("redis://host:6379/0") == "redis://host:6379/0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kv-blocks", "many"), "'--kv-blocks': 'many' is not a valid integer"),
        (("--gpu-memory-utilization", "most"), "'most' is not a valid number"),
        (("--device", "gpu"), "--device 'gpu' is none of auto, cpu, cuda, cuda:N"),
        (("--attention", "flash"), "'flash' is not one of 'auto', 'sdpa'"),
        (("--block-size", "7"), "--block-size"),
        (("--heartbeat", "5"), "write 200ms, 60s, 5m or 1h"),
        (("--heartbeat", "4s", "--lease", "5s"), "two heartbeats"),
        (("--mode", "exact"), "deterministic"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--prefix-caching-hash-algo", "xxhash"), "WARMFRONT_HASH_SEED"),
        (("--worker-token-file", "/no/such/file"), "the secret in /no/such/file: No such file or directory"),
        (("--config", "/no/such/file"), "/no/such/file"),
        (("--redis", ""), "--redis"),
    ],
)
def test_a_bad_value_ends_with_2_and_one_line(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    result = cli("worker", *REDIS, *arguments)
    assert (result.exit_code, result.out) == (2, "")
    assert words in result.err
    assert result.err.count("\n") == 1


def test_a_bad_value_that_nobody_typed_is_told_with_its_place(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "warmfront.yaml"
    file.write_text("replicas: two\n")
    told = cli("config", "show", "up", "--config", str(file)).err
    assert told == f"warmfront: Invalid value for '--replicas': 'two' is not a valid integer. (in {file})\n"
    monkeypatch.setenv("WARMFRONT_KV_BLOCKS", "many")
    told = cli("config", "show", "worker").err
    assert told.endswith("'many' is not a valid integer. (WARMFRONT_KV_BLOCKS in the environment)\n")


def test_a_file_that_is_no_yaml_mapping_is_refused(cli: Cli, tmp_path: Path) -> None:
    for content, words in (
        ("- a\n- b\n", "expected lines"),
        ("a: [1\nb: 2}\n", "bad.yaml: line 2, column 2: "),
        ("model: {a: 1}\n", "one value"),
    ):
        file = tmp_path / "bad.yaml"
        file.write_text(content)
        result = cli("config", "show", "up", "--config", str(file))
        assert (result.exit_code, words in result.err, result.err.count("\n")) == (2, True, 1), result.err


def test_router_and_worker_need_a_redis(cli: Cli) -> None:
    for command in ("router", "worker"):
        result = cli(command)
        assert (result.exit_code, "--redis is missing" in result.err) == (2, True)


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("200ms", 0.2), ("5m", 300), ("1h", 3600), ("1.5s", 1.5)])
def test_durations_read_and_print_back(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == pytest.approx(seconds)
    assert Duration().convert(format_duration(seconds), None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_what_is_no_number_is_within_no_bounds(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Number(0, min_open=True).convert(text, None, None)


def test_a_duration_of_more_than_a_year_is_refused() -> None:
    with pytest.raises(click.BadParameter, match="more than a year"):
        Duration().convert("99999999999h", None, None)


@pytest.mark.parametrize("text", ["60", "s", "-1s", "1 s", "1d", ""])
def test_a_duration_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="no duration"):
        Duration().convert(text, None, None)


def test_the_hash_seed_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"redis": "redis://h/0", "replica_id": "w0", "prefix_caching_hash_algo": "xxhash"}
    monkeypatch.setenv("WARMFRONT_HASH_SEED", "from the environment")
    assert fill(WorkerConfig, base).hash_seed == "from the environment"
    seed = tmp_path / "seed"
    seed.write_text("from the file\n")
    assert fill(WorkerConfig, {**base, "prefix_caching_hash_seed_file": str(seed)}).hash_seed == "from the file"
    seed.write_text("\n")
    with pytest.raises(WrongUse, match="is empty"):
        fill(WorkerConfig, {**base, "prefix_caching_hash_seed_file": str(seed)})


def test_every_setting_of_a_part_has_a_flag() -> None:
    flagged = {name for flag in FLAGS for name in flag.fields}
    for configs in CONFIGS.values():
        for config in configs:
            assert {field.name for field in dataclasses.fields(config)} <= flagged, config


def test_every_flag_belongs_to_a_command_and_has_one_default() -> None:
    used = {flag.name for command in CONFIGS for flag in flags_of(command)}
    assert used == {flag.name for flag in FLAGS}
    for flag in set(flags_of("router")) & set(flags_of("worker")):
        defaults = {default_of(flag, "router"), default_of(flag, "worker")} - {None}
        assert len(defaults) <= 1, f"--{flag.name} has the defaults {defaults}"


def test_settings_become_configurations() -> None:
    params = {"redis": "redis://h/0", "http_port": 0, "grpc_port": 0, "fleet": "f", "block_size": 32, "lease": 7.0}
    router = fill(RouterConfig, params)
    worker = fill(WorkerConfig, params, replica_id="w0")
    assert (router.fleet, router.block_size, router.lease_s, router.http_port) == ("f", 32, 7.0, 0)
    assert (worker.fleet, worker.block_size, worker.lease_s, worker.replica_id) == ("f", 32, 7.0, "w0")


@pytest.mark.parametrize("module", ["warmfront.__main__", "warmfront.up", "warmfront.compare", "warmfront.parts"])
def test_importing_the_command_line_imports_neither_torch_nor_ray(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_names_every_command_without_importing_one() -> None:
    code = (
        "import sys\n"
        "from warmfront.__main__ import main, COMMANDS\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    print([m for m, _, _ in COMMANDS.values() if m in sys.modules], 'numpy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("up", "chat", "status", "compare", "generate", "drain", "down", "router", "worker", "config"):
        assert f"\n  {name} " in done.stdout
    assert done.stdout.strip().endswith("[] False")


@pytest.mark.parametrize("module", ["click", "warmfront.rollout"])
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(module: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # it is ignored where the tests run under nohup
        "from warmfront.__main__ import main\n"
        "main(['rollout', '--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (-signal.SIGINT, "", "")


def test_ctrl_c_is_the_command_s_own_once_it_runs(cli: Cli) -> None:
    cli("config", "show", "up")
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)


def test_version(cli: Cli) -> None:
    assert cli("--version").out == "warmfront 0.1.0\n"
