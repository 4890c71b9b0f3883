"""A whole worker over the fake model in the test's own event loop, and a client for it."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from warmfront_pb.v1 import inference_pb2, worker_pb2, worker_pb2_grpc

from tests.fakes.runner import FakeRunner, fake_loader
from tests.support import packed
from worker.config import WorkerConfig
from worker.main import Worker

TOKEN = "a-shared-token"
_fleets = itertools.count()


def config_for(valkey_url: str, **more: Any) -> WorkerConfig:
    settings: dict[str, Any] = {
        "replica_id": "w0",
        "redis_url": valkey_url,
        "fleet": f"fleet-{next(_fleets)}",
        "worker_token": TOKEN,
        "heartbeat_s": 0.1,
        "lease_s": 1.0,
        "token_reuse": False,
    }
    return WorkerConfig(**{**settings, **more})


def unpacked(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


@dataclass
class Reply:
    messages: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    trailing: dict[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for message in self.messages for token_id in unpacked(message.token_ids)]

    @property
    def text(self) -> str:
        return "".join(message.text for message in self.messages)

    @property
    def usage(self) -> inference_pb2.Usage:
        return self.messages[-1].usage


class Client:
    def __init__(self, address: str, token: str = TOKEN) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        self.metadata = (("authorization", f"Bearer {token}"),)

    def start(self, token_ids: Sequence[int], *, timeout: float | None = None, **more: Any) -> Any:
        sampling = inference_pb2.SamplingParams(**{"seed": 5, "ignore_eos": True, **more.pop("sampling", {})})
        more.setdefault("request_id", "r")
        message = worker_pb2.WorkerGenerateRequest(token_ids=packed(token_ids), sampling=sampling, **more)
        return self.stub.Generate(message, metadata=self.metadata, timeout=timeout)

    async def generate(self, token_ids: Sequence[int], **more: Any) -> Reply:
        call = self.start(token_ids, **more)
        reply = Reply([message async for message in call])
        reply.trailing = dict(await call.trailing_metadata())
        return reply

    async def fail(self, token_ids: Sequence[int], **more: Any) -> grpc.aio.AioRpcError:
        try:
            reply = await self.generate(token_ids, **more)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"it answered: {reply}")


@dataclass
class Served:
    worker: Worker
    task: asyncio.Task[int]
    client: Client
    runner: FakeRunner

    @property
    def address(self) -> str:
        return self.worker.replica.address


@asynccontextmanager
async def serve(
    config: WorkerConfig, *, step_s: float = 0.0, runner: FakeRunner | None = None, **more: Any
) -> AsyncIterator[Served]:
    """A READY worker; drained in the end if it still runs."""
    runner = runner or FakeRunner(201, config.block_size, step_s=step_s)
    worker = Worker(config, fake_loader(runner=runner), **more)
    ready: asyncio.Event = asyncio.Event()
    task = asyncio.create_task(worker.run(lambda _: ready.set()))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    assert not task.done(), f"it ended with {task.result()}: {worker.replica.fault}"
    client = Client(worker.replica.address)
    try:
        yield Served(worker, task, client, runner)
    finally:
        await client.channel.close()
        worker.drain(0.0)
        await task
