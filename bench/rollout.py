"""A rolling replacement of all workers under steady load, with pre-warm and without: does a user notice?

    python -P bench/rollout.py [--replicas 4] [--tenants 96] [--users 40] [--quick] [--seed 8] [--svg FILE]

Real routers, Valkey and workers in processes of their own; the engines are simulated and only take their time. Users
of many tenants (Zipf 0.8; each has a system prompt of 1,000 to 2,500 tokens) hold conversations of up to 6 turns. After
a while of steady load each worker is replaced: a new one starts, and when it is READY the old one gets SIGTERM.

Prints a JSON line per run and one that compares them. ``hit_ratio``: hit rate of a 10 s window during the rollout (or
in the first minute after it) / that of the steady load; ``ttft_p95_ratio``: the same of the 95th percentile of TTFT.
Ends with 1 when the run with pre-warm misses a goal (hits at least 0.9, TTFT at most 1.3), or any request its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import yaml
from warmfront_pb.v1 import inference_pb2, inference_pb2_grpc

from warmfront.client import Client
from warmfront.errors import Failure
from warmfront.processes import child_environment
from warmfront.run_dir import write_private
from warmfront.store import EmbeddedValkey, lasting_port

WINDOW_S = 10.0
START_GUARD_S = 120.0
VOCABULARY = (1000, 32000)
MAX_TURNS = 6
MEAN_THINK_S = 2.0
ZIPF = 0.8
LEAST_HIT_RATIO, MOST_TTFT_RATIO = 0.9, 1.3  # of the run with pre-warm


@dataclass(frozen=True, slots=True)
class Served:
    at_s: float  # of the first token, since the load began
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Run:
    served: list[Served] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # requests without a token
    cuts: list[str] = field(default_factory=list)  # streams that broke off
    ready_s: list[float] = field(default_factory=list)  # from a new worker's start to READY
    rollout: tuple[float, float] = (0.0, 0.0)  # since the load began

    def between(self, start_s: float, end_s: float) -> list[Served]:
        return [one for one in self.served if start_s <= one.at_s < end_s]


def hit_rate(served: Sequence[Served]) -> float:
    return sum(one.cached_tokens for one in served) / max(1, sum(one.prompt_tokens for one in served))


def ttft_p95(served: Sequence[Served]) -> float:
    return statistics.quantiles([one.ttft_s for one in served], n=20)[-1] if len(served) > 1 else 0.0


# The load


class Load:
    """Users who talk until ``stop`` is set. Open in time: an answer that is late delays its own user alone."""

    def __init__(self, address: str, options: argparse.Namespace, run: Run) -> None:
        rng = random.Random(options.seed)
        self._systems = [self._tokens(rng, rng.randrange(1000, 2501)) for _ in range(options.tenants)]
        self._weights = list(accumulate((rank + 1) ** -ZIPF for rank in range(options.tenants)))
        self._options = options
        self._address = address
        self._run = run
        self._began_s = time.monotonic()
        self.stop = asyncio.Event()

    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def run(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(*(self._user(stub, number) for number in range(self._options.users)))

    async def _user(self, stub: Any, number: int) -> None:
        rng = random.Random(f"{self._options.seed} {number}")
        while not self.stop.is_set():
            (system,) = rng.choices(self._systems, cum_weights=self._weights)
            prompt = list(system)
            for _ in range(rng.randint(1, MAX_TURNS)):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), rng.expovariate(1 / MEAN_THINK_S))
                if self.stop.is_set():
                    return
                prompt += self._tokens(rng, rng.randrange(20, 120))
                answer = await self._ask(stub, prompt, rng)
                if answer is None:
                    break
                prompt += answer

    async def _ask(self, stub: Any, prompt: list[int], rng: random.Random) -> list[int] | None:
        sampling = inference_pb2.SamplingParams(
            max_tokens=rng.randrange(8, 24), ignore_eos=True, seed=rng.getrandbits(32)
        )
        packed = np.asarray(prompt, dtype="<u4").tobytes()
        request = inference_pb2.GenerateRequest(token_ids=packed, sampling=sampling)
        sent_s, ttft_s, at_s, answer, usage = time.monotonic(), None, 0.0, b"", None
        try:
            async for message in stub.Generate(request, timeout=60):
                if ttft_s is None:
                    ttft_s, at_s = time.monotonic() - sent_s, self.now_s()
                answer += message.token_ids
                usage = message.usage if message.HasField("usage") else usage
        except grpc.aio.AioRpcError as error:
            where = self._run.failures if ttft_s is None else self._run.cuts
            where.append(f"{error.code().name}: {error.details()}")
            return None
        if ttft_s is None or usage is None:
            self._run.cuts.append("a stream ended without its usage")
            return None
        self._run.served.append(Served(at_s, ttft_s, usage.prompt_tokens, usage.cached_tokens))
        return list(np.frombuffer(answer, dtype="<u4").tolist())

    @staticmethod
    def _tokens(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(*VOCABULARY) for _ in range(count)]


# The cluster


class Cluster:
    def __init__(self, directory: Path, options: argparse.Namespace, prewarm: bool) -> None:
        self._directory = directory
        self._options = options
        self._prewarm = prewarm
        self._valkey = EmbeddedValkey(directory, {})
        self._config = directory / "redis.yaml"
        write_private(self._config, yaml.safe_dump({"redis": self._valkey.url}))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.grpc = f"127.0.0.1:{lasting_port()}"
        self.http = f"http://127.0.0.1:{lasting_port()}"

    async def start(self) -> None:
        router = ["--http-port", self.http.rpartition(":")[2], "--grpc-port", self.grpc.rpartition(":")[2]]
        self._launch("router", "router", [*router, "--log-level", "WARNING"])
        for number in range(self._options.replicas):
            self.add_worker(f"old-{number}")
        await self.until_ready([f"old-{number}" for number in range(self._options.replicas)])

    def add_worker(self, name: str) -> None:
        flags = ["--replica-id", name, "--engine", "simulated", "--model", "bytes"]
        flags += ["--kv-blocks", f"{self._options.kv_blocks}", "--max-model-len", "8000"]
        flags += ["--prefill-tokens-per-s", f"{self._options.prefill_tokens_per_s}", "--decode-time", "10ms"]
        flags += ["--prewarm" if self._prewarm else "--no-prewarm", "--prewarm-target", f"{self._options.target}"]
        self._launch("worker", name, flags)

    async def until_ready(self, names: Sequence[str]) -> None:
        client, end_s = Client(self.http, timeout_s=10), time.monotonic() + START_GUARD_S
        while True:
            with contextlib.suppress(Failure):
                found = (await asyncio.to_thread(client.get, "/v1/replicas"))["replicas"]
                is_ready = {one["id"] for one in found if one["state"] == "READY"} >= set(names)
                if is_ready and await asyncio.to_thread(client.is_ready):
                    return
            dead = [name for name, process in self._processes.items() if process.poll() is not None]
            if dead or time.monotonic() > end_s:
                raise SystemExit(
                    f"not ready: {names}, ended: {dead}; {self.log(dead[0] if dead else names[0])[-2000:]}"
                )
            await asyncio.sleep(0.1)

    async def remove_worker(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        if code := await asyncio.to_thread(process.wait, 60):
            raise SystemExit(f"{name} ended with {code}: {self.log(name)[-2000:]}")

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._valkey.stop()

    def _launch(self, command: str, name: str, flags: list[str]) -> None:
        common = ["--config", str(self._config), "--fleet", "rollout", "--heartbeat", "500ms", "--lease", "5s"]
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "warmfront", command, *common, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
            )


async def roll(options: argparse.Namespace, prewarm: bool) -> Run:
    run = Run()
    with tempfile.TemporaryDirectory(prefix="wf-rollout-") as directory:
        cluster = Cluster(Path(directory), options, prewarm)
        try:
            await cluster.start()
            load = Load(cluster.grpc, options, run)
            running = asyncio.create_task(load.run())
            await asyncio.sleep(options.settle + options.steady)
            began_s = load.now_s()
            for number in range(options.replicas):
                started_s = time.monotonic()
                cluster.add_worker(f"new-{number}")
                await cluster.until_ready([f"new-{number}"])
                run.ready_s.append(time.monotonic() - started_s)
                await cluster.remove_worker(f"old-{number}")
                await asyncio.sleep(options.pause)
            run.rollout = (began_s, load.now_s())
            await asyncio.sleep(options.after)
            load.stop.set()
            await running
        finally:
            cluster.close()
    return run


# The figures


def windows(run: Run, options: argparse.Namespace) -> Iterator[tuple[float, list[Served]]]:
    """The 10 s windows of the rollout and of what comes after it, by their start."""
    start_s, end_s = run.rollout[0], run.rollout[1] + options.after
    while start_s + WINDOW_S <= end_s:
        yield start_s, run.between(start_s, start_s + WINDOW_S)
        start_s += WINDOW_S


def report(run: Run, options: argparse.Namespace, prewarm: bool) -> dict[str, Any]:
    steady = run.between(options.settle, run.rollout[0])
    steady_rate, steady_p95 = hit_rate(steady), ttft_p95(steady)
    during = run.between(run.rollout[0], run.rollout[1] + WINDOW_S)
    rates = [round(hit_rate(served) / steady_rate, 3) for _, served in windows(run, options)]
    return {
        "bench": "rollout",
        "prewarm": prewarm,
        "requests": len(run.served),
        "failed_requests": len(run.failures),
        "cut_streams": len(run.cuts),
        "errors": sorted(set(run.failures + run.cuts))[:5],
        "steady_hit_rate": round(steady_rate, 3),
        "steady_ttft_p95_ms": round(1000 * steady_p95, 1),
        "hit_ratio_worst_window": min(rates),
        "hit_ratio_windows": rates,
        "ttft_p95_ratio": round(ttft_p95(during) / steady_p95, 2),
        "computed_tokens_ratio": round(_computed_per_request(during) / _computed_per_request(steady), 2),
        "start_to_ready_s": [round(seconds, 1) for seconds in run.ready_s],
        "rollout_s": round(run.rollout[1] - run.rollout[0], 1),
    }


def missed_goals(figures: dict[str, Any]) -> list[str]:
    """What a run's report falls short of. Without pre-warm only that nobody goes without an answer."""
    goals = [(key, figures[key], figures[key] == 0) for key in ("failed_requests", "cut_streams")]
    if figures["prewarm"]:
        hits, ttft = figures["hit_ratio_worst_window"], figures["ttft_p95_ratio"]
        goals.append(("hit_ratio_worst_window", hits, hits >= LEAST_HIT_RATIO))
        goals.append(("ttft_p95_ratio", ttft, ttft <= MOST_TTFT_RATIO))
    return [f"{name} {value}" for name, value, is_met in goals if not is_met]


def _computed_per_request(served: Sequence[Served]) -> float:
    return sum(one.prompt_tokens - one.cached_tokens for one in served) / max(1, len(served))


def svg(runs: dict[str, tuple[Run, dict[str, Any]]], options: argparse.Namespace) -> str:
    """Hit rate over time, one line per run, 0 to 1; the rollout is shaded."""
    width, height, end_s = 900, 320, max(run.rollout[1] for run, _ in runs.values()) + options.after
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 40}" font-family="sans-serif">']
    for (name, (run, _)), colour in zip(runs.items(), ("#0a7", "#c40"), strict=False):
        left, right = (width * at_s / end_s for at_s in run.rollout)
        parts.append(
            f'<rect x="{left:.0f}" y="0" width="{right - left:.0f}" height="{height}" fill="{colour}" opacity=".07"/>'
        )
        points = [
            f"{width * (start_s + 2.5) / end_s:.0f},{height * (1 - hit_rate(served)):.0f}"
            for start_s in np.arange(0, end_s - 2.5, 2.5)
            if (served := run.between(start_s, start_s + 5))
        ]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = height + (15 if colour == "#0a7" else 32)
        parts.append(
            f'<text x="8" y="{y}" fill="{colour}">{name}: hit rate over {end_s:.0f} s, 0 to 1; rollout shaded</text>'
        )
    return "\n".join([*parts, "</svg>"])


def main() -> None:
    parser = argparse.ArgumentParser(description="A rolling replacement under load, with pre-warm and without.")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tenants", type=int, default=96)
    parser.add_argument("--users", type=int, default=40)
    parser.add_argument("--kv-blocks", type=int, default=16384, help="per worker, of 16 tokens")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=40_000)
    parser.add_argument("--target", type=float, default=0.9, help="--prewarm-target of the workers")
    parser.add_argument("--settle", type=float, default=40, help="seconds before anything is measured")
    parser.add_argument("--steady", type=float, default=30, help="seconds of steady load")
    parser.add_argument("--pause", type=float, default=3, help="seconds between two replacements")
    parser.add_argument("--after", type=float, default=30, help="seconds after the last one")
    parser.add_argument("--quick", action="store_true", help="a minute per run")
    parser.add_argument("--only", choices=["with", "without"], help="one of the two runs")
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--svg", type=Path, help="draw the hit rates over time there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes are ended
    if options.quick:
        options.settle, options.steady, options.pause, options.after = 15, 12, 1, 10
    runs: dict[str, tuple[Run, dict[str, Any]]] = {}
    for name, prewarm in (("with", True), ("without", False)):
        if options.only in (None, name):
            run = asyncio.run(roll(options, prewarm))
            runs[f"{name} pre-warm"] = (run, report(run, options, prewarm))
            print(json.dumps(runs[f"{name} pre-warm"][1]), flush=True)
    if len(runs) == 2:
        warm, cold = (figures for _, figures in runs.values())
        keys = ("hit_ratio_worst_window", "ttft_p95_ratio", "computed_tokens_ratio", "failed_requests", "cut_streams")
        print(json.dumps({"bench": "rollout", "compared": {key: [warm[key], cold[key]] for key in keys}}))
    if options.svg is not None:
        options.svg.write_text(svg(runs, options), encoding="utf-8")
    missed = [goal for _, figures in runs.values() for goal in missed_goals(figures)]
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
