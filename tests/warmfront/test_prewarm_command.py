"""``warmfront hot`` and ``warmfront prewarm``, against a real worker around a simulated engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from warmfront_pb.v1 import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc

from cache.hot import HotPrefix, by_value, encode_hot
from tests.support import free_port, packed
from tests.warmfront.conftest import Cli
from warmfront.run_dir import RunDir
from warmfront.store import EmbeddedValkey
from worker.config import WorkerConfig
from worker.loading.tokenizer import load_tokenizer
from worker.main import Worker
from worker.simulated import BYTES, byte_tokenizer

TOKEN = "a-shared-token"
SYSTEM, OTHER = list(range(100, 164)), list(range(200, 232))


HOT = [HotPrefix(packed(SYSTEM), 8.0), HotPrefix(packed(OTHER), 4.0)]


@dataclass
class Running:
    redis: str
    address: str
    token_file: str

    def cached(self, token_ids: Sequence[int]) -> int:
        """Tokens of a prompt that the worker does not compute."""
        with grpc.insecure_channel(self.address) as channel:
            request = worker_pb2.WorkerGenerateRequest(
                request_id="r", token_ids=packed(token_ids), sampling=inference_pb2.SamplingParams(max_tokens=1)
            )
            metadata = (("authorization", f"Bearer {TOKEN}"),)
            *_, last = worker_pb2_grpc.WorkerStub(channel).Generate(request, metadata=metadata)
            return int(last.usage.cached_tokens)


def run_worker(config: WorkerConfig) -> tuple[Worker, threading.Thread, asyncio.AbstractEventLoop]:
    """A READY worker with an event loop and a thread of its own."""
    made: dict[str, Any] = {}
    ready = threading.Event()

    async def run() -> None:
        made["loop"] = asyncio.get_running_loop()
        made["worker"] = Worker(config)
        await made["worker"].run(lambda _: ready.set())

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(60)
    return made["worker"], thread, made["loop"]


@contextmanager
def worker_of(store: str, tmp_path: Path, prefill_tokens_per_s: float = 2000.0) -> Iterator[Running]:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    config = WorkerConfig(
        replica_id="w0",
        redis_url=store,
        engine="simulated",
        model=BYTES,
        kv_blocks=64,
        token_reuse=False,
        worker_token=TOKEN,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    worker, thread, loop = run_worker(config)
    yield Running(store, worker.replica.address, str(token_file))
    loop.call_soon_threadsafe(worker.drain, 0.0)
    thread.join(30)


@pytest.fixture
def running(store: str, tmp_path: Path) -> Iterator[Running]:
    with worker_of(store, tmp_path) as one:
        yield one


@pytest.fixture
def hot(store: str) -> Iterator[None]:
    """As two routers have written it."""
    with redis.Redis.from_url(store) as client:
        client.flushall()
        now_ms = int(client.time()[0]) * 1000
        for router in ("r0", "r1"):
            half = [HotPrefix(one.token_ids, one.hits / 2) for one in HOT]
            client.set(f"wf:{{default}}:hot:{router}", encode_hot(by_value(half, 1 << 20), now_ms, "bytes"))
            client.zadd("wf:{default}:hot", {router: now_ms})
        yield
        client.flushall()


def test_hot_lists_what_the_routers_wrote_added_up(cli: Cli, store: str, hot: None) -> None:
    result = cli("hot", "--redis", store)
    assert result.exit_code == 0, result.err
    assert [line.split()[:3] for line in result.out.splitlines() if line.endswith("...")] == [
        ["8.0", "64", "64"],
        ["4.0", "32", "32"],
    ]
    assert "hot prefixes: 2, different tokens: 96, written by 2 routers" in result.out


def test_hot_prefixes_are_read_as_text_by_their_own_tokenizer_alone(cli: Cli, store: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8}
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "max_position_embeddings": 64,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    text = "You answer in French.\nBe brief."
    prefix = HotPrefix(packed(tokenizer.encode(text).ids), 3.0)
    for fingerprint in (load_tokenizer(folder).fingerprint, "another"):
        with redis.Redis.from_url(store) as client:
            client.flushall()
            now_ms = int(client.time()[0]) * 1000
            client.set("wf:{default}:hot:r0", encode_hot(by_value([prefix], 1 << 20), now_ms, fingerprint))
            client.zadd("wf:{default}:hot", {"r0": now_ms})
        table = cli("hot", "--redis", store, "--text", "--model", str(folder))
        if fingerprint == "another":
            assert (table.exit_code, "another tokenizer" in table.err) == (2, True)
            continue
        assert "You answer in French. Be brief." in table.out
        line = json.loads(cli("hot", "--redis", store, "--json", "--model", str(folder)).out)
        assert line["text"] == text
    missing = cli("hot", "--redis", store, "--text", "--model", str(tmp_path / "none"))
    assert (missing.exit_code, "no model at" in missing.err) == (2, True)


def test_a_redis_that_refuses_a_password_is_not_said_to_be_silent(cli: Cli, store: str) -> None:
    result = cli("hot", "--redis", store.replace("//", "//somebody:wrong@"))
    assert (result.exit_code, "Redis refuses us at redis://somebody:***@127.0.0.1" in result.err) == (2, True)


def test_a_fleet_without_hot_prefixes_says_so(cli: Cli, store: str) -> None:
    result = cli("hot", "--redis", store, "--fleet", "empty")
    assert (result.exit_code, "has no hot prefixes" in result.out) == (0, True)


def test_of_several_clusters_here_none_is_taken_for_the_one_that_is_meant(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no `up` of this machine embeds one" in cli("hot").err
    for number in (1, 2):
        cluster = RunDir.create()
        cluster.cluster = {"http": f"http://127.0.0.1:800{number}", "fleet": "default"}
        cluster.save()
        (cluster.path / "valkey").mkdir()
        settings = f"requirepass secret\nbind 127.0.0.1\nport {number}\n"  # where nobody listens
        (cluster.path / "valkey" / "valkey.conf").write_text(settings)
        if number == 1:
            assert "no Redis answers at redis://:***@127.0.0.1:1/0" in cli("hot").err
    result = cli("hot")
    assert result.exit_code == 2
    assert "choose one with --redis or WARMFRONT_URL: http://127.0.0.1:8001, http://127.0.0.1:8002" in result.err
    monkeypatch.setenv("WARMFRONT_URL", "http://127.0.0.1:8002")
    assert "no Redis answers at redis://:***@127.0.0.1:2/0" in cli("hot").err
    monkeypatch.setenv("WARMFRONT_URL", "http://127.0.0.1:8003")
    assert "no cluster of yours here has that address" in cli("hot").err


def test_a_worker_is_filled_from_redis(cli: Cli, hot: None, running: Running) -> None:
    arguments = ("prewarm", "--target", running.address, "--redis", running.redis)
    result = cli(*arguments, "--worker-token-file", running.token_file, "--min-hit-rate", "1")
    assert result.exit_code == 0, result.err
    assert "100% of what hot prefixes save, 2 of 2 prefixes, 96 tokens" in result.out
    assert running.cached([*SYSTEM, 7]) == 64
    assert running.cached([*OTHER, 7]) == 32


def test_what_hot_prints_as_json_fills_a_worker_from_a_file(
    cli: Cli, hot: None, store: str, running: Running, tmp_path: Path
) -> None:
    printed = cli("hot", "--redis", store, "--json").out
    assert [json.loads(line)["tokens"] for line in printed.splitlines()] == [64, 32]
    file = tmp_path / "hot.jsonl"
    file.write_text(printed)
    result = cli("prewarm", "--target", running.address, "--from", str(file), "--worker-token-file", running.token_file)
    assert result.exit_code == 0, result.err
    assert running.cached([*SYSTEM, 7]) == 64


@pytest.mark.parametrize(
    ("lines", "more", "code", "words"),
    [
        ([{"token_ids": list(range(2000))}], (), 1, "--min-hit-rate is 0.9, but no more fits"),
        ([{"token_ids": list(range(900))}], ("--deadline", "50ms"), 3, "at the deadline of 50ms"),
        ([{"token_ids": [-1]}], (), 2, "line 1"),
        ([{"hits": 3}], (), 2, "line 1: token_ids is missing; expected"),
    ],
)
def test_the_exit_code_says_how_it_ended(
    cli: Cli, running: Running, tmp_path: Path, lines: list[Any], more: tuple[str, ...], code: int, words: str
) -> None:
    file = tmp_path / "hot.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ("prewarm", "--target", running.address, "--worker-token-file", running.token_file)
    result = cli(*arguments, "--from", str(file), *more)
    assert (result.exit_code, words in result.err, result.err.count("warmfront: --") <= 1) == (code, True, True)


def test_a_fleet_that_has_too_much_to_do_gets_its_worker_at_once(
    cli: Cli, hot: None, store: str, tmp_path: Path
) -> None:
    lease = common_pb2.ReplicaLease(replica="w9", generation="1", state=common_pb2.READY)
    lease.load.waiting_tokens, lease.load.prefill_tokens_per_s = 100_000, 1000
    with redis.Redis.from_url(store) as client, worker_of(store, tmp_path, prefill_tokens_per_s=2.0) as slow:
        client.zadd("wf:{default}:replicas", {"w9": int(client.time()[0]) * 1000})
        client.set("wf:{default}:replica:w9", lease.SerializeToString())
        arguments = ("prewarm", "--target", slow.address, "--redis", store)
        result = cli(*arguments, "--worker-token-file", slow.token_file, "--min-hit-rate", "1")
    assert (result.exit_code, "100.0 s of prefill wait" in result.out) == (0, True), result.err


def test_a_worker_that_never_comes_ends_with_the_deadline(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "hot.jsonl"
    file.write_text(json.dumps({"token_ids": SYSTEM}))
    target = f"127.0.0.1:{free_port()}"
    late = cli("prewarm", "--target", target, "--from", str(file), "--deadline", "200ms")
    assert (late.exit_code, f"{target}: nobody answers there" in late.err) == (3, True)
    for address in ("w0", "http://127.0.0.1:1", "127.0.0.1"):
        wrong = cli("prewarm", "--target", address, "--from", str(file))
        assert (wrong.exit_code, f"--target {address}: write HOST:PORT" in wrong.err) == (2, True)


def test_a_wrong_token_or_a_missing_redis_is_wrong_use(cli: Cli, running: Running, tmp_path: Path) -> None:
    file = tmp_path / "hot.jsonl"
    file.write_text(json.dumps({"token_ids": SYSTEM}))
    refused = cli("prewarm", "--target", running.address, "--from", str(file))
    assert (refused.exit_code, "UNAUTHENTICATED" in refused.err) == (2, True)
    for command in (("prewarm", "--target", running.address), ("hot",)):
        missing = cli(*command)
        assert (missing.exit_code, "--redis is missing" in missing.err) == (2, True)


def test_the_valkey_of_an_up_on_this_machine_is_found(cli: Cli) -> None:
    run_dir = RunDir.create()
    run_dir.cluster = {"fleet": "mine"}
    run_dir.save()
    valkey = EmbeddedValkey(run_dir.path, {})
    try:
        assert "fleet 'mine' has no hot prefixes" in cli("hot", "--fleet", "mine").out
        assert cli("hot", "--fleet", "another").exit_code == 2
    finally:
        valkey.stop()
        run_dir.remove()
