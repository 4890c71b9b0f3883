"""Adapters on a running worker: loaded and unloaded beside its requests, each with answers and KV of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from warmfront_pb.v1 import common_pb2, worker_pb2

from cache.adapter import Adapter
from cache.block_hash import HashScheme, extra_keys
from tests.fakes.runner import FakeRunner, fake_loader
from tests.worker.adapters import adapter_config
from tests.worker.served import Client, Served, config_for, serve
from tests.worker.test_main import lease_of
from worker.adapters import find_folder, read_files
from worker.config import ConfigError, WorkerConfig
from worker.main import EXIT_OK, EXIT_WRONG_USE, Worker
from worker.peft import CONFIG_FILE, TENSORS_FILE, AdapterError
from worker.replica import Loaded, Progress
from worker.simulated import UncheckedReader

PROMPT = list(range(100, 140))
FULL = 32  # tokens of PROMPT in whole blocks


def write(folder: Path, content: bytes = b"weights", **more: Any) -> Path:
    """Enough of an adapter for an engine that has no model."""
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(adapter_config(**more)))
    (folder / TENSORS_FILE).write_bytes(content)
    return folder


def config_with(valkey_url: str, folder: Path, **more: Any) -> WorkerConfig:
    return config_for(valkey_url, **{"lora_dir": (folder,), **more})


async def load(client: Client, name: str, path: Path | str) -> worker_pb2.LoadWorkerLoraResponse:
    request = worker_pb2.LoadWorkerLoraRequest(name=name, path=str(path))
    response: worker_pb2.LoadWorkerLoraResponse = await client.stub.LoadLora(request, metadata=client.metadata)
    return response


async def unload(client: Client, name: str) -> worker_pb2.UnloadWorkerLoraResponse:
    request = worker_pb2.UnloadWorkerLoraRequest(name=name)
    response: worker_pb2.UnloadWorkerLoraResponse = await client.stub.UnloadLora(request, metadata=client.metadata)
    return response


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"it answered: {answer}")


async def cached(served: Served, **more: Any) -> int:
    return int((await served.client.generate(PROMPT, sampling={"max_tokens": 1}, **more)).usage.cached_tokens)


@asynccontextmanager
async def held(served: Served) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Steps do not end within; the function waits until so many jobs wait for the engine behind the step."""
    engine = served.worker._engine
    assert engine is not None

    async def jobs(count: int) -> None:
        async with asyncio.timeout(20):
            while not engine.step_age_s() or len(engine._inbox) != count:
                await asyncio.sleep(0.001)

    served.runner.hangs.set()
    try:
        yield jobs
    finally:
        served.runner.hangs.clear()


async def test_each_adapter_and_the_base_have_answers_and_kv_of_their_own(valkey_url: str, tmp_path: Path) -> None:
    async with serve(config_with(valkey_url, tmp_path)) as served:
        for name in ("french", "org/german:v1"):
            answer = await load(served.client, name, write(tmp_path / name, name.encode(), rank=5))
            assert (answer.lora.name, answer.lora.rank, answer.was_loaded) == (name, 5, False)
        answers = []
        for name in ("", "french", "org/german:v1"):
            reply = await served.client.generate(PROMPT, lora=name, sampling={"max_tokens": 6})
            answers.append(reply.token_ids)
            assert reply.usage.cached_tokens == 0
            assert await cached(served, lora=name) == FULL
            assert await cached(served, lora=name, cache_salt="s") == 0
        assert len({tuple(one) for one in answers}) == 3


async def test_other_content_under_one_name_needs_an_unload_and_never_meets_the_old_kv(
    valkey_url: str, tmp_path: Path
) -> None:
    first, second = write(tmp_path / "v1", b"1"), write(tmp_path / "v2", b"2")
    async with serve(config_with(valkey_url, tmp_path)) as served:
        one = await load(served.client, "a", first)
        assert await cached(served, lora="a") == 0
        code, words = await refusal(load(served.client, "a", second))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "unload it first" in words
        assert await cached(served, lora="a") == FULL
        await unload(served.client, "a")
        assert (await refusal(served.client.generate(PROMPT, lora="a")))[0] is grpc.StatusCode.NOT_FOUND
        two = await load(served.client, "a", second)
        assert two.lora.version != one.lora.version
        assert await cached(served, lora="a") == 0
        assert await cached(served, lora="a") == FULL
        assert await cached(served, lora="a", lora_version=two.lora.version) == FULL
        code, words = await refusal(served.client.generate(PROMPT, lora="a", lora_version=one.lora.version))
        assert (code, "is not loaded here; its version here is" in words) == (grpc.StatusCode.NOT_FOUND, True)
        # What was cached of the first is still true of the first.
        await unload(served.client, "a")
        await load(served.client, "a", first)
        assert await cached(served, lora="a") == FULL


async def test_equal_content_loads_once_wherever_it_lies(valkey_url: str, tmp_path: Path) -> None:
    first, copy = write(tmp_path / "v1"), tmp_path / "elsewhere"
    shutil.copytree(first, copy)
    async with serve(config_with(valkey_url, tmp_path)) as served:
        one, two = await load(served.client, "a", first), await load(served.client, "a", copy)
        assert (two.lora, two.was_loaded) == (one.lora, True)
        assert served.runner.adapters == {f"a@{one.lora.version}"}


async def test_block_hashes_are_those_that_a_router_computes_of_name_and_version(
    valkey_url: str, tmp_path: Path
) -> None:
    async with serve(config_with(valkey_url, tmp_path)) as served:
        version = (await load(served.client, "a", write(tmp_path / "a"))).lora.version
        reply = await served.client.generate(PROMPT, lora="a", cache_salt="s", sampling={"max_tokens": 20})
        engine = served.worker._engine
        assert engine is not None
        snapshot = await asyncio.wrap_future(engine.cache_snapshot())
    tokens = [*PROMPT, *reply.token_ids]
    extra = extra_keys(len(tokens), 16, lora=Adapter("a", version), cache_salt="s")
    wanted = HashScheme(block_size=16).keys(tokens, extra)
    held = [key for run in snapshot.runs for key in run.keys]
    assert held == list(wanted[: (len(tokens) - 1) // 16])


async def test_an_unload_lets_running_requests_end_and_then_frees_the_memory(valkey_url: str, tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", b"b")
    async with serve(config_with(valkey_url, tmp_path, max_loras=1)) as served:
        await load(served.client, "a", "a")
        alone = await served.client.generate(PROMPT, lora="a", sampling={"max_tokens": 30})
        async with held(served) as jobs:
            running = []
            for number, name in enumerate(("a", "a", "a", "")):
                asking = served.client.generate(PROMPT, lora=name, sampling={"max_tokens": 30})
                running.append(asyncio.create_task(asking))
                await jobs(number)  # the first one is in the step
            unloading = asyncio.create_task(unload(served.client, "a"))
            await jobs(4)
            assert (await refusal(served.client.generate(PROMPT, lora="a")))[0] is grpc.StatusCode.NOT_FOUND
            loading = asyncio.create_task(refusal(load(served.client, "b", "b")))
            await jobs(5)
            assert served.runner.adapters
        assert (await unloading).running == 3
        code, words = await loading
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "1 of them until their last requests end" in words
        for reply in (await asyncio.gather(*running))[:3]:
            assert reply.token_ids == alone.token_ids
        assert not served.runner.adapters
        await load(served.client, "b", "b")
        assert await cached(served, lora="b") == 0


async def test_an_adapter_that_comes_back_before_its_last_request_has_ended_stays(
    valkey_url: str, tmp_path: Path
) -> None:
    write(tmp_path / "a")
    async with serve(config_with(valkey_url, tmp_path, max_loras=1)) as served:
        await load(served.client, "a", "a")
        async with held(served) as jobs:
            asking = asyncio.create_task(served.client.generate(PROMPT, lora="a", sampling={"max_tokens": 3}))
            await jobs(0)
            unloading = asyncio.create_task(unload(served.client, "a"))
            await jobs(1)
            loading = asyncio.create_task(load(served.client, "a", "a"))
            await jobs(2)
        assert (await unloading).running == 1
        assert not (await loading).was_loaded
        assert len((await asking).token_ids) == 3
        assert await cached(served, lora="a") == FULL
        assert len(served.runner.adapters) == 1


async def test_requests_that_are_cancelled_preempted_or_poisoned_free_their_adapter_too(
    valkey_url: str, tmp_path: Path
) -> None:
    write(tmp_path / "a")
    # 14 blocks hold two answers of 100 tokens only by turns.
    config = config_with(valkey_url, tmp_path, kv_blocks=14, enable_prefix_caching=False)
    async with serve(config) as served:
        runner = served.runner
        await load(served.client, "a", "a")
        alone = (await served.client.generate(PROMPT, lora="a", sampling={"max_tokens": 100})).token_ids
        async with held(served) as jobs:
            asking = []
            for number in range(3):
                one = served.client.generate(PROMPT, lora="a", sampling={"max_tokens": 100})
                asking.append(asyncio.create_task(one))
                await jobs(number)
            unloading = asyncio.create_task(unload(served.client, "a"))
            await jobs(3)
            asking[2].cancel()
            await jobs(4)
        assert (await unloading).running == 3
        assert [reply.token_ids for reply in await asyncio.gather(*asking[:2])] == [alone, alone]
        assert not runner.adapters
        await load(served.client, "a", "a")
        runner.poison = lambda one: "broken" if one.start else None
        assert (await refusal(served.client.generate(PROMPT, lora="a")))[0] is grpc.StatusCode.INTERNAL
        runner.poison = lambda one: None
        assert (await unload(served.client, "a")).running == 0
        assert not runner.adapters


async def test_as_many_as_max_loras_fit_and_the_lease_lists_them(valkey_url: str, tmp_path: Path) -> None:
    config = config_with(valkey_url, tmp_path, max_loras=2, max_lora_rank=16)
    async with serve(config) as served:
        versions = {}
        for name in ("b", "a"):
            versions[name] = (await load(served.client, name, write(tmp_path / name, name.encode()))).lora.version
            lease = await lease_of(config)  # the answer comes when the lease stands in Redis
            assert lease is not None
            assert name in [one.name for one in lease.loras]
        assert [(one.name, one.version, one.rank) for one in lease.loras] == [
            ("a", versions["a"], 8),
            ("b", versions["b"], 8),
        ]
        code, words = await refusal(load(served.client, "c", write(tmp_path / "c", b"c")))
        assert (code, "--max-loras" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        await unload(served.client, "a")
        lease = await lease_of(config)
        assert lease is not None
        assert [one.name for one in lease.loras] == ["b"]
        code, words = await refusal(load(served.client, "d", write(tmp_path / "d", b"d", rank=17)))
        assert (code, "rank 17 is over --max-lora-rank 16" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        await load(served.client, "c", "c")


async def test_two_loads_at_once_under_one_name_have_one_winner(valkey_url: str, tmp_path: Path) -> None:
    async with serve(config_with(valkey_url, tmp_path)) as served:
        write(tmp_path / "v1", b"1")
        write(tmp_path / "v2", b"2")
        both = await asyncio.gather(*(load(served.client, "a", v) for v in ("v1", "v2")), return_exceptions=True)
        lost = [one for one in both if isinstance(one, grpc.aio.AioRpcError)]
        assert [error.code() for error in lost] == [grpc.StatusCode.FAILED_PRECONDITION]
        assert len(served.runner.adapters) == 1


def slow_worker(config: WorkerConfig, runner: FakeRunner, gate: threading.Event) -> Worker:
    """One on which the adapter whose content is "slow" is not read before the event is set."""

    class SlowReader(UncheckedReader):
        def __call__(self, config: bytes, tensors: bytes) -> tuple[None, int]:
            assert tensors != b"slow" or gate.wait(20)
            return super().__call__(config, tensors)

    def loader(config: WorkerConfig, progress: Progress) -> Loaded:
        return dataclasses.replace(fake_loader(runner=runner)(config, progress), adapter_reader=SlowReader(64))

    return Worker(config, loader)


@asynccontextmanager
async def slow_loads(valkey_url: str, folder: Path) -> AsyncIterator[tuple[Served, threading.Event]]:
    """A ``slow_worker`` that is READY, and its event."""
    gate, config = threading.Event(), config_with(valkey_url, folder)
    runner = FakeRunner(201, config.block_size)
    worker, ready = slow_worker(config, runner, gate), asyncio.Event()
    life = asyncio.create_task(worker.run(lambda _: ready.set()))
    await ready.wait()
    client = Client(worker.replica.address)
    try:
        yield Served(worker, life, client, runner), gate
    finally:
        gate.set()
        await client.channel.close()
        worker.drain(0.0)
        assert await life == 0


async def until_loading(worker: Worker) -> None:
    async with asyncio.timeout(20):
        while (adapters := worker._service._adapters) is None or not adapters._loading.locked():
            await asyncio.sleep(0.001)


async def test_neither_requests_nor_unloads_wait_for_a_slow_load(valkey_url: str, tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", b"slow")
    async with slow_loads(valkey_url, tmp_path) as (served, gate):
        await load(served.client, "a", "a")
        slow = asyncio.create_task(load(served.client, "b", "b"))
        await until_loading(served.worker)
        assert await cached(served, lora="a") == 0
        assert (await unload(served.client, "a")).running == 0
        assert not slow.done()
        gate.set()
        assert (await slow).lora.name == "b"


async def test_a_load_goes_on_when_its_client_has_left(valkey_url: str, tmp_path: Path) -> None:
    write(tmp_path / "a", b"slow")
    async with slow_loads(valkey_url, tmp_path) as (served, gate):
        call = served.client.stub.LoadLora(
            worker_pb2.LoadWorkerLoraRequest(name="a", path="a"), metadata=served.client.metadata
        )
        calling = asyncio.ensure_future(call)
        await until_loading(served.worker)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        gate.set()
        assert (await load(served.client, "a", "a")).was_loaded


async def test_without_lora_dir_loading_is_refused_by_name(valkey_url: str, tmp_path: Path) -> None:
    async with serve(config_for(valkey_url)) as served:
        code, words = await refusal(load(served.client, "a", write(tmp_path / "a")))
        assert (code, "--lora-dir" in words) == (grpc.StatusCode.UNIMPLEMENTED, True)
        assert (await refusal(unload(served.client, "a")))[0] is grpc.StatusCode.NOT_FOUND
        code, words = await refusal(served.client.generate(PROMPT, lora="a"))
        assert (code, "no adapter 'a'" in words) == (grpc.StatusCode.NOT_FOUND, True)


@pytest.mark.parametrize("name", ["", "a b", "-a", "a@1", "ä", "a" * 129, "fake"])
async def test_names_that_are_none_or_the_model_s_own_are_refused(valkey_url: str, tmp_path: Path, name: str) -> None:
    async with serve(config_with(valkey_url, tmp_path)) as served:
        code, _ = await refusal(load(served.client, name, write(tmp_path / "a")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_starts_with_its_own_adapters_wherever_they_lie(valkey_url: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    real = folder / TENSORS_FILE
    real.rename(tmp_path / "blob")
    real.symlink_to(tmp_path / "blob")
    config = config_for(valkey_url, lora=(f"a={folder}",))
    async with serve(config) as served:
        lease = await lease_of(config)
        assert lease is not None
        assert [one.name for one in lease.loras] == ["a"]
        assert await cached(served, lora="a") == 0


async def test_a_worker_whose_own_adapter_is_wrong_ends_with_2(
    valkey_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = write(tmp_path / "a", use_dora=True)
    assert await Worker(config_for(valkey_url, lora=(f"a={wrong}",)), fake_loader()).run() == EXIT_WRONG_USE
    assert "use_dora" in caplog.text
    assert await Worker(config_for(valkey_url, lora=("a=/no/such",)), fake_loader()).run() == EXIT_WRONG_USE
    assert "--lora a: there is no folder /no/such" in caplog.text


async def test_a_worker_that_drains_while_its_own_adapters_load_is_never_ready(
    valkey_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    own = (f"a={write(tmp_path / 'a', b'slow')}", f"b={write(tmp_path / 'b')}")
    config = config_for(valkey_url, lora=own, prewarm=False)
    gate, addresses = threading.Event(), list[str]()
    worker = slow_worker(config, FakeRunner(201, config.block_size), gate)
    life = asyncio.create_task(worker.run(addresses.append))
    await until_loading(worker)
    worker.drain()
    gate.set()
    assert await life == EXIT_OK
    assert (addresses, "state=READY" in caplog.text) == ([], False)
    assert worker._service._adapters is not None
    assert [one.adapter.name for one in worker._service._adapters.listed] == ["a"], "the other one has not begun"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora": ("a",)}, "NAME=PATH"),
        ({"lora": ("a=",)}, "NAME=PATH"),
        ({"lora": ("a b=/x",)}, "NAME=PATH"),
        ({"lora": ("a=/x", "a=/y")}, "same name"),
        ({"lora": ("a=/x", "b=/y"), "max_loras": 1}, "--max-loras 1"),
        ({"max_loras": 0}, "--max-loras"),
        ({"max_lora_rank": 0}, "--max-lora-rank"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WorkerConfig(replica_id="w0", redis_url="redis://h/0", **settings)


# From where files may be read


def test_paths_are_found_below_the_folders_and_nowhere_else(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    inside, secret = write(second / "deep" / "a"), write(tmp_path / "secret")
    first.mkdir()
    (second / "out").symlink_to(secret)
    (second / "in").symlink_to(inside)
    folders = [first, second]
    for path in ("deep/a", str(inside), "in", "deep/../deep/a", str(second / "deep" / "." / "a")):
        assert find_folder(path, folders) == (inside, second)
    for path in (
        *("", "a", "..", "../secret", "deep/../../secret", str(secret), "out", str(second / "out"), "/etc", "\0"),
        *("/no/such", "no/such", f"{second}/../secret", "~"),
    ):
        with pytest.raises(AdapterError) as caught:
            find_folder(path, folders)
        assert "is no folder below any --lora-dir" in str(caught.value) or "path is missing" in str(caught.value)


def test_files_that_lead_out_are_pipes_too_long_or_pickled_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    secret = write(tmp_path / "secret")

    def refused(folder: Path, words: str, max_bytes: int = 1000) -> None:
        with pytest.raises(AdapterError, match=words):
            read_files(folder, root, max_bytes)

    linked = write(root / "linked")
    for name in (CONFIG_FILE, TENSORS_FILE):
        content = (linked / name).read_bytes()
        (linked / name).unlink()
        (linked / name).symlink_to(secret / name)
        refused(linked, "leads out of")
        (linked / name).unlink()
        (linked / name).write_bytes(content)
    assert read_files(linked, root, 1000) == read_files(secret, tmp_path, 1000)
    piped = write(root / "piped")
    (piped / TENSORS_FILE).unlink()
    refused(piped, "cannot read .*: No such file")
    os.mkfifo(piped / TENSORS_FILE)
    refused(piped, "no ordinary file")
    refused(write(root / "long", b"x" * 1001), "has 1001 bytes, more than the 1000")
    pickled = write(root / "pickled")
    (pickled / TENSORS_FILE).rename(pickled / "adapter_model.bin")
    refused(pickled, "pickled weights can run code")
    (pickled / CONFIG_FILE).unlink()
    (pickled / TENSORS_FILE).mkdir()
    refused(pickled, CONFIG_FILE)


def test_paths_that_no_system_call_takes_are_refused_in_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for path in (
        "a" * 256,
        f"a/{'b' * 300}",
        "loop",
        "one/a",
        f"{tmp_path}/loop",
        "/a" * 2048,
        "a/" * 2048,
        "ä" * 2048,
    ):
        with pytest.raises(AdapterError, match="is no folder below any --lora-dir") as caught:
            find_folder(path, [tmp_path])
        assert len(str(caught.value)) < 400
    for path in ("/a" * 1_000_000, "a" * 4097, "ä" * 2049):
        with pytest.raises(AdapterError, match="longer than the 4096 bytes") as caught:
            find_folder(path, [tmp_path])
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSORS_FILE])
async def test_what_cannot_be_read_is_refused_without_telling_where_the_folder_lies(
    valkey_url: str, tmp_path: Path, name: str
) -> None:
    file = write(tmp_path / "a") / name
    file.unlink()
    async with serve(config_with(valkey_url, tmp_path)) as served:
        for target, words in ((name, "symbolic links"), ("/etc/passwd", "leads out of"), ("none", "No such file")):
            file.unlink(missing_ok=True)
            file.symlink_to(target)
            code, told = await refusal(load(served.client, "a", "a"))
            assert (code, words in told) == (grpc.StatusCode.INVALID_ARGUMENT, True), told
            assert f"'a/{name}'" in told
            assert str(tmp_path) not in told
        code, told = await refusal(load(served.client, "a", "b" * 256))
        assert (code, str(tmp_path) in told) == (grpc.StatusCode.INVALID_ARGUMENT, False)


async def test_a_call_ends_whatever_text_its_error_has(valkey_url: str, tmp_path: Path) -> None:
    class Reader(UncheckedReader):
        def __call__(self, config: bytes, tensors: bytes) -> tuple[None, int]:
            raise AdapterError("a key '\ud800' of the file")

    async with serve(config_with(valkey_url, tmp_path)) as served:
        write(tmp_path / "key", **{"\ud800": 1})
        code, told = await refusal(load(served.client, "a", "key"))
        assert (code, r"'\ud800' 1 is not supported" in told) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        adapters = served.worker._service._adapters
        assert adapters is not None
        adapters._reader = Reader(64)
        code, told = await refusal(load(served.client, "a", "key"))
        assert (code, told) == (grpc.StatusCode.INVALID_ARGUMENT, r"a key '\ud800' of the file")
        code, told = await refusal(load(served.client, "n" * 100_000, "key"))
        assert (code, len(told) < 400) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        code, told = await refusal(unload(served.client, "n" * 100_000))
        assert (code, len(told) < 400) == (grpc.StatusCode.NOT_FOUND, True)


def test_the_version_tells_which_file_a_byte_belongs_to(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", b"abc")
    config = (folder / CONFIG_FILE).read_bytes()
    first = read_files(folder, tmp_path, 1000).version
    (folder / CONFIG_FILE).write_bytes(config + b"a")
    (folder / TENSORS_FILE).write_bytes(b"bc")
    assert read_files(folder, tmp_path, 1000).version != first


async def test_a_draining_worker_loads_nothing(valkey_url: str, tmp_path: Path) -> None:
    write(tmp_path / "a")
    async with serve(config_with(valkey_url, tmp_path), step_s=0.02) as served:
        call = served.client.start(PROMPT, sampling={"max_tokens": 100})
        await call.read()
        served.worker.drain()
        assert served.worker.replica.state == common_pb2.DRAINING
        assert (await refusal(load(served.client, "a", "a")))[0] is grpc.StatusCode.UNAVAILABLE
        call.cancel()
