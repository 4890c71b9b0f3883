"""The same load over the wire: real routers, real workers around simulated engines, an embedded Valkey, gRPC.

Each policy gets a cluster of its own, cold. All simulated times are stretched by ``time_scale``, so that this machine's
own work weighs little beside them, and what is measured is shrunk by it again. Answers are what the engines say, so a
later turn of a conversation carries those and not the recorded ones, of the same length.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import yaml
from warmfront_pb.v1 import inference_pb2, inference_pb2_grpc

from router.flow import bound_of
from warmfront.client import Client
from warmfront.errors import Failure, WrongUse
from warmfront.processes import child_environment, last_line
from warmfront.replay.settings import IN_FLIGHT_PER_REPLICA, Settings
from warmfront.replay.simulation import Outcome, Progress
from warmfront.replay.trace import MOONCAKE_BLOCK_SIZE, Turn
from warmfront.run_dir import write_private
from warmfront.store import EmbeddedValkey, die_with_parent, lasting_port
from warmfront.values import format_duration

_MAX_BLOCK_SIZE = 256
_START_DEADLINE_S = 120.0
_REQUEST_DEADLINE_S = 600.0
_TOKENS_OF_RECORDS = 60_000  # token ids for hash ids are drawn below this
_REGRET = re.compile(r"^warmfront_router_regret_tokens_total (\S+)$", re.MULTILINE)


def run_live(
    turns: Sequence[Turn], block_size: int, settings: Settings, time_scale: float, progress: Progress | None = None
) -> Outcome:
    """Run a trace against a cluster of its own. Raises ``WrongUse`` and ``Failure``."""
    if block_size > _MAX_BLOCK_SIZE:
        raise WrongUse(f"--live: workers have blocks of up to {_MAX_BLOCK_SIZE} tokens; name a --block-size")
    with tempfile.TemporaryDirectory(prefix="wf-replay-") as directory:
        return asyncio.run(_run(turns, block_size, settings, time_scale, progress, Path(directory)))


async def _run(
    turns: Sequence[Turn],
    block_size: int,
    settings: Settings,
    time_scale: float,
    progress: Progress | None,
    directory: Path,
) -> Outcome:
    async with _cluster(block_size, settings, time_scale, directory) as routers:
        client = _Client(turns, settings, time_scale, [router.grpc for router in routers], progress)
        outcome = await client.run()
        outcome.regret_tokens = sum(router.regret_tokens() for router in routers)
        return outcome


# The cluster


@dataclass(frozen=True, slots=True)
class _RouterAt:
    http: str
    grpc: str

    def regret_tokens(self) -> int:
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=10) as response:  # noqa: S310 (our own router)
            found = _REGRET.search(response.read().decode())
        return int(float(found[1])) if found else 0


@contextlib.asynccontextmanager
async def _cluster(
    block_size: int, settings: Settings, time_scale: float, directory: Path
) -> AsyncIterator[list[_RouterAt]]:
    """A fleet of simulated replicas in one process, and its routers, all ready."""
    valkey = EmbeddedValkey(directory, {})
    processes: list[subprocess.Popen[bytes]] = []
    try:
        heartbeat_s = settings.heartbeat_s * time_scale
        config = directory / "redis.yaml"  # its password is nothing for a list of processes
        write_private(config, yaml.safe_dump({"redis": valkey.url}))
        common = ["--config", str(config), "--fleet", "replay", "--heartbeat", format_duration(heartbeat_s)]
        common += ["--lease", format_duration(max(5.0, 5 * heartbeat_s))]
        worker = ["worker", *common, "--engine", "simulated", "--model", "bytes", "--replica-id", "r"]
        worker += ["--count", f"{settings.num_replicas}", "--kv-blocks", f"{settings.kv_blocks}"]
        worker += ["--host-kv-blocks", f"{settings.host_kv_blocks}"]
        worker += ["--host-tokens-per-s", f"{settings.host_tokens_per_s}"]
        worker += ["--block-size", f"{block_size}", "--time-scale", f"{time_scale}"]
        worker += ["--prefill-tokens-per-s", f"{settings.prefill_tokens_per_s}"]
        worker += ["--decode-time", format_duration(settings.decode_s)]
        worker += ["--max-num-batched-tokens", f"{settings.max_num_batched_tokens}"]
        worker += ["--max-num-seqs", f"{settings.max_num_seqs}"]
        worker += ["--no-token-reuse"]  # the virtual clock knows whole blocks alone
        processes.append(_start(worker, directory / "worker.log"))
        # What a replica is given at most is as much as it computes in a second: in one that is not stretched.
        max_tokens = bound_of(settings, settings.prefill_tokens_per_s).tokens
        routers = []
        for number in range(settings.num_routers):
            http, rpc = lasting_port(), lasting_port()
            router = ["router", *common, "--policy", settings.policy, "--replica-tokens", f"{max_tokens}"]
            router += ["--http-port", f"{http}", "--grpc-port", f"{rpc}", "--log-level", "WARNING"]
            processes.append(_start(router, directory / f"router-{number}.log"))
            routers.append(_RouterAt(f"http://127.0.0.1:{http}", f"127.0.0.1:{rpc}"))
        await _until_ready(routers, settings.num_replicas, processes, directory)
        yield routers
    finally:
        for process in processes:
            process.kill()
            process.wait()
        valkey.stop()


def _start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "warmfront", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(),
            preexec_fn=die_with_parent,
        )


async def _until_ready(
    routers: Sequence[_RouterAt], num_replicas: int, processes: Sequence[subprocess.Popen[bytes]], directory: Path
) -> None:
    deadline_s = time.monotonic() + _START_DEADLINE_S
    for router in routers:
        client = Client(router.http, timeout_s=10)
        while not _sees_all(client, num_replicas):
            logs = ["worker.log", *(f"router-{number}.log" for number in range(len(routers)))]
            for process, log in zip(processes, logs, strict=True):
                if process.poll() is not None:
                    raise Failure(f"a part ended with code {process.returncode}: {last_line(directory / log)}")
            if time.monotonic() > deadline_s:
                raise Failure(f"the cluster is not ready after {_START_DEADLINE_S:.0f} s")
            await asyncio.sleep(0.1)


def _sees_all(client: Client, num_replicas: int) -> bool:
    if not client.is_ready():
        return False
    replicas: list[dict[str, str]] = client.get("/v1/replicas")["replicas"]
    return sum(one["state"] == "READY" for one in replicas) == num_replicas


# The clients


class _Client:
    """Sends the trace in the order and at the times that the virtual clients do."""

    def __init__(
        self,
        turns: Sequence[Turn],
        settings: Settings,
        time_scale: float,
        routers: Sequence[str],
        progress: Progress | None,
    ) -> None:
        self._turns = turns
        self._settings = settings
        self._time_scale = time_scale
        self._addresses = routers
        self._progress = progress
        self._stubs: list[inference_pb2_grpc.InferenceStub] = []
        self._num_sent = 0
        self._num_ended = 0
        self._said: dict[str, tuple[int, array[int]]] = {}  # per session: tokens in the record, and those really said
        self._outcome = Outcome(settings)
        self._outcome.requests_of = [0] * settings.num_replicas
        self._outcome.prefill_of = [0] * settings.num_replicas

    async def run(self) -> Outcome:
        sessions: dict[str, list[int]] = {}
        for number, turn in enumerate(self._turns):
            sessions.setdefault(turn.session, []).append(number)
        left = {session: iter(numbers) for session, numbers in sessions.items()}
        async with contextlib.AsyncExitStack() as stack:
            for address in self._addresses:
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
                self._stubs.append(inference_pb2_grpc.InferenceStub(channel))
            started_s = time.monotonic()
            if self._settings.speed is None:
                await self._closed_loop(left)
            else:
                await asyncio.gather(*(self._session(numbers, started_s) for numbers in left.values()))
            self._outcome.makespan_s = (time.monotonic() - started_s) / self._time_scale
        if self._progress is not None:
            self._progress(self._num_ended)
        return self._outcome

    async def _closed_loop(self, left: dict[str, Iterator[int]]) -> None:
        sendable = sorted(next(numbers) for numbers in left.values())

        async def place() -> None:
            while sendable:
                number = heapq.heappop(sendable)
                await self._send(number)
                following = next(left[self._turns[number].session], None)
                if following is not None:
                    heapq.heappush(sendable, following)

        count = self._settings.in_flight or IN_FLIGHT_PER_REPLICA * self._settings.num_replicas
        await asyncio.gather(*(place() for _ in range(count)))

    async def _session(self, numbers: Iterator[int], started_s: float) -> None:
        assert self._settings.speed is not None
        first_s = self._turns[0].at_s
        for number in numbers:
            due_s = started_s + (self._turns[number].at_s - first_s) / self._settings.speed * self._time_scale
            await asyncio.sleep(due_s - time.monotonic())
            await self._send(number)

    async def _send(self, number: int) -> None:
        turn, outcome = self._turns[number], self._outcome
        stub = self._stubs[self._num_sent % len(self._stubs)]
        self._num_sent += 1
        prompt = self._prompt(turn)
        request = inference_pb2.GenerateRequest(
            token_ids=_packed(prompt),
            sampling=inference_pb2.SamplingParams(
                max_tokens=turn.num_output_tokens, temperature=0, ignore_eos=True, seed=number
            ),
        )
        sent_s = time.monotonic()
        ttft_s: float | None = None
        answer = array("i")
        num_cached = 0
        call = stub.Generate(request, timeout=_REQUEST_DEADLINE_S, metadata=(("x-warmfront-session", turn.session),))
        try:
            async for message in call:
                if ttft_s is None:
                    ttft_s = time.monotonic() - sent_s
                answer.frombytes(_native(message.token_ids))
                num_cached = message.usage.cached_tokens if message.HasField("usage") else num_cached
            trailing = dict(await call.trailing_metadata() or ())
        except grpc.aio.AioRpcError as error:
            raise Failure(f"a request failed with {error.code().name}: {error.details()}") from error
        assert ttft_s is not None
        replica = int(str(trailing["x-warmfront-replica"]).rpartition("-")[2]) if self._settings.num_replicas > 1 else 0
        self._said[turn.session] = (turn.num_tokens + turn.num_output_tokens, prompt + answer)
        outcome.ttft_s.append(ttft_s / self._time_scale)
        outcome.first_token_at_s.append((sent_s + ttft_s) / self._time_scale)
        outcome.prompt_tokens.append(len(prompt))
        outcome.hit_tokens.append(num_cached)
        outcome.num_prompt_tokens += len(prompt)
        outcome.num_hit_tokens += num_cached
        outcome.requests_of[replica] += 1
        outcome.prefill_of[replica] += len(prompt) - num_cached
        self._num_ended += 1
        if self._progress is not None:
            self._progress(self._num_ended)

    def _prompt(self, turn: Turn) -> array[int]:
        """The recorded prompt, with the answers that were really given in the place of the recorded ones."""
        if turn.token_ids is None:
            parts = (
                np.random.default_rng(one).integers(_TOKENS_OF_RECORDS, size=MOONCAKE_BLOCK_SIZE)
                for one in turn.hash_ids
            )
            return array("i", np.concatenate(list(parts)).astype(np.int32).tobytes())[: turn.num_tokens]
        num_recorded, said = self._said.get(turn.session, (0, array("i")))
        if not turn.output_token_ids or num_recorded > turn.num_tokens:
            return turn.token_ids
        return said + turn.token_ids[num_recorded:]


def _packed(token_ids: array[int]) -> bytes:
    """Little-endian uint32."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def _native(packed: bytes) -> bytes:
    return np.frombuffer(packed, dtype="<u4").astype(np.int32).tobytes()
