"""A replica without a model: the real Worker protocol, the real prefix cache, real leases and events in Redis.

It takes the time that a cost model says, and each token is a function of all tokens before it, so that an answer that
is continued elsewhere equals one that was not. It can be told to misbehave: see ``Faults``. As a program it runs until
it is killed: ``python -m tests.fakes.simulated_worker --redis URL --id w0``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import secrets
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from warmfront_pb.v1 import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc

from cache.adapter import Adapter
from cache.block_hash import DEFAULT_SEED, HashScheme, extra_keys
from cache.events import EventBatch, encode_batch, encode_snapshot
from cache.prefix_cache import PrefixCache
from common.trace import MAX_METADATA_BYTES

TOKEN = "secret"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and the two that frame a message."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


@dataclass
class Faults:
    """What goes wrong from now on."""

    statuses: list[grpc.StatusCode] = field(default_factory=list)  # the next requests are answered with these
    statuses_of_explain: list[grpc.StatusCode] = field(default_factory=list)  # the same of ExplainCache
    cut_after_tokens: int | None = None  # streams break off with UNAVAILABLE
    gate: asyncio.Event | None = None  # requests wait until it is set
    is_hung: bool = False  # while it is, requests neither go on nor fail
    hung_s: float = 0.0  # what the lease says of that
    waiting_tokens: int = 0  # and of what is to be computed there
    padding: int = 0  # characters that come with each token
    nonsense_after_tokens: int | None = None  # then a message comes that makes no sense
    is_hung_on_model: bool = False  # nor does the question for the model
    lost_batches: int = 0  # so many event batches never reach Redis
    corrupt_batches: int = 0  # so many arrive as rubbish
    is_silent: bool = False  # no lease is written
    is_reporting_paused: bool = False  # neither lease nor events
    lost_loras: set[str] = field(default_factory=set)  # the lease has them still


@dataclass
class Spec:
    redis_url: str
    replica: str = "w0"
    fleet: str = "default"
    generation: str = ""
    num_blocks: int = 1024
    num_host_blocks: int = 0
    block_size: int = 16
    algorithm: str = "sha256_cbor"
    seed: str = DEFAULT_SEED
    prefix_caching: bool = True
    model_name: str = "simulated"
    max_model_len: int = 4096
    prefill_tokens_per_s: float = 200_000.0
    decode_s: float = 0.0
    heartbeat_s: float = 0.1
    lease_s: float = 1.0
    max_queue: int = 1000
    protocol_version: int = 2
    own_contract: bool = False  # register with a contract of its own, whatever the fleet's is


class SimulatedWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.faults = Faults()
        self.generation = spec.generation or f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(3)}"
        self.scheme = HashScheme(spec.algorithm, spec.block_size, spec.seed)
        self.cache = PrefixCache(
            spec.num_blocks,
            self.scheme,
            spec.prefix_caching,
            replica=spec.replica,
            generation=self.generation,
            num_host_blocks=spec.num_host_blocks,
        )
        self.state: int = common_pb2.READY
        self.requests: list[worker_pb2.WorkerGenerateRequest] = []
        self.deadlines_s: list[float | None] = []  # what each was given
        self.metadata: list[dict[str, str]] = []  # that came with each
        self.drain_deadlines_ms: list[int] = []  # that it was told to drain within
        self.num_asked_for_model = 0
        self.num_cancelled = 0
        self.num_answered = 0  # to their ends
        self.running = self.most_running = 0
        self.address = ""
        self.loras: dict[str, str] = {}  # versions by name
        self.tokenizer = byte_tokenizer()
        self._prefill = asyncio.Lock()
        self._heartbeat = 0
        self._needs_snapshot = True
        self._batches: list[EventBatch] = []
        self._reporting = asyncio.Lock()
        self._redis = redis_asyncio.from_url(spec.redis_url, protocol=2, socket_timeout=1, retry=None)
        # The limit is a real worker's: of what is larger than gRPC's own one some calls are refused, by lot.
        options = (("grpc.so_reuseport", 0), ("grpc.max_metadata_size", MAX_METADATA_BYTES))
        self._server = grpc.aio.server(options=options)
        self.register(self._server)
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    def register(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)

    async def start(self) -> SimulatedWorker:
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        with contextlib.suppress(RedisError, OSError):
            await self.report()
        self._task = asyncio.create_task(self._beat())
        return self

    async def stop(self) -> None:
        """Leave without a word, as a killed process does."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._server.stop(None)
        await self._redis.aclose()

    async def leave(self) -> None:
        """As one does that has drained: first its lease goes, then its server."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._redis.delete(self._key(f"replica:{self.spec.replica}"))
        await self._redis.zrem(self._key("replicas"), self.spec.replica)
        await self.stop()

    # Worker service

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        self.metadata.append({str(name): str(value) for name, value in context.invocation_metadata() or ()})
        await self._check(request, context)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async with contextlib.aclosing(self._answer(request, context)) as messages:  # it frees its blocks at once
                async for message in messages:
                    yield message
            self.num_answered += 1
        except (asyncio.CancelledError, GeneratorExit):  # the one while it computes, the other while it writes
            self.num_cancelled += 1
            raise
        finally:
            self.running -= 1

    async def GetModel(
        self, request: worker_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetModelResponse:
        await self._authenticate(context)
        self.num_asked_for_model += 1
        while self.faults.is_hung_on_model:
            await asyncio.sleep(0.01)
        return worker_pb2.GetModelResponse(
            served_model_name=self.spec.model_name,
            tokenizer_json=self.tokenizer.to_str(),
            chat_template=TEMPLATE,
            eos_token="<|im_end|>",
            eos_token_ids=[self.tokenizer.token_to_id("<|im_end|>")],
            max_model_len=self.spec.max_model_len,
            vocab_size=self.tokenizer.get_vocab_size(),
            contract=self.contract(),
        )

    async def Drain(
        self, request: worker_pb2.DrainWorkerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainWorkerResponse:
        await self._authenticate(context)
        self.state = common_pb2.DRAINING
        self.drain_deadlines_ms.append(request.deadline_ms)
        await self.report()
        return worker_pb2.DrainWorkerResponse(running=self.running)

    async def ResetCache(
        self, request: worker_pb2.ResetWorkerCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ResetWorkerCacheResponse:
        await self._authenticate(context)
        num_blocks = self.cache.num_cached_blocks
        if not self.cache.reset():
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "requests hold blocks")
        await self.report_events()
        return worker_pb2.ResetWorkerCacheResponse(blocks=num_blocks)

    async def ExplainCache(
        self, request: worker_pb2.ExplainCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.CacheExplanation:
        await self._authenticate(context)
        if self.faults.statuses_of_explain:
            await context.abort(self.faults.statuses_of_explain.pop(0), "told to fail")
        if request.WhichOneof("of") == "missing_key":
            eviction = self.cache.eviction_of(request.missing_key)
            answer = common_pb2.CacheExplanation(reason="never_seen" if eviction is None else "evicted")
        else:
            prompt = memoryview(request.token_ids).cast("I").tolist()
            adapter = Adapter(request.lora, request.lora_version) if request.lora else None
            extra = extra_keys(len(prompt), self.spec.block_size, lora=adapter, cache_salt=request.cache_salt or None)
            found = self.cache.explain(self.scheme.chain(prompt, extra))
            eviction = found.eviction
            answer = common_pb2.CacheExplanation(reason=found.reason, cached_tokens=found.num_matched_tokens)
        if eviction is not None:
            answer.evicted_ago_s = time.time() - eviction.time_s
            answer.removal_reason = eviction.reason.name.lower()
            answer.evicted_for = str(eviction.culprit).partition("/")[0]
        return answer

    async def LoadLora(
        self, request: worker_pb2.LoadWorkerLoraRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.LoadWorkerLoraResponse:
        """Content is whatever the path says; a path that begins with "no" is refused."""
        await self._authenticate(context)
        if request.path.startswith("no"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.path} cannot be used")
        version = hashlib.sha256(request.path.encode()).hexdigest()
        was_loaded = request.name in self.loras
        if self.loras.setdefault(request.name, version) != version:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "other content: unload it first")
        await self.report()
        return worker_pb2.LoadWorkerLoraResponse(lora=self._lora(request.name), was_loaded=was_loaded)

    async def UnloadLora(
        self, request: worker_pb2.UnloadWorkerLoraRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.UnloadWorkerLoraResponse:
        await self._authenticate(context)
        if request.name not in self.loras:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no adapter {request.name!r} is loaded here")
        gone = self._lora(request.name)
        del self.loras[request.name]
        await self.report()
        return worker_pb2.UnloadWorkerLoraResponse(lora=gone, running=self.running)

    def _lora(self, name: str) -> common_pb2.LoadedLora:
        return common_pb2.LoadedLora(name=name, version=self.loras[name], rank=8)

    async def _authenticate(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if dict(context.invocation_metadata() or ()).get("authorization") != f"Bearer {TOKEN}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")

    async def _check(
        self, request: worker_pb2.WorkerGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        await self._authenticate(context)
        if self.faults.statuses:
            await context.abort(self.faults.statuses.pop(0), "told to fail")
        if self.faults.gate is not None:
            await self.faults.gate.wait()
        await self._hang()
        if request.generation != self.generation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another generation")
        is_lost = request.lora in self.faults.lost_loras
        if request.lora and (is_lost or self.loras.get(request.lora) != request.lora_version):
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no adapter {request.lora!r} of that version is loaded here"
            )
        if self.state != common_pb2.READY:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        if self.running >= self.spec.max_queue:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")

    async def _hang(self) -> None:
        while self.faults.is_hung:
            await asyncio.sleep(0.01)

    async def _answer(
        self, request: worker_pb2.WorkerGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        prompt = memoryview(request.token_ids).cast("I").tolist()
        prior = request.num_prior_output_tokens
        adapter = Adapter(request.lora, request.lora_version) if request.lora else None
        extra = extra_keys(len(prompt), self.spec.block_size, lora=adapter, cache_salt=request.cache_salt or None)
        seed = request.sampling.seed + (zlib.crc32(str(adapter).encode()) if adapter else 0)
        num_cached = 0
        output_keys: list[int] = []
        completed = 0
        for index in range(request.sampling.n):
            request_id = f"{request.request_id}/{secrets.token_hex(4)}"
            chain = self.scheme.chain(prompt, extra)
            num_prompt_blocks = len(chain.keys)
            async with self._prefill:
                while (admission := self.cache.admit(request_id, chain, time.time())) is None:
                    await asyncio.sleep(0.005)
                if index == 0:
                    num_cached = admission.num_cached_tokens
                try:
                    await asyncio.sleep((len(prompt) - admission.num_cached_tokens) / self.spec.prefill_tokens_per_s)
                    self.cache.commit(request_id, len(prompt))
                    await self.report_events()
                except BaseException:
                    self.cache.free(request_id)
                    raise
            try:
                text = ""
                for position in range(prior, request.sampling.max_tokens):
                    if self.faults.cut_after_tokens is not None and position - prior >= self.faults.cut_after_tokens:
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "cut in the middle")
                    await self._hang()
                    if position - prior == self.faults.nonsense_after_tokens:
                        yield inference_pb2.GenerateResponse(index=99)
                    token = self._next_token(chain.token_ids, seed + index)
                    if position > prior and self.spec.decode_s:
                        await asyncio.sleep(self.spec.decode_s)
                    self.cache.append(request_id, [token])
                    self.cache.commit(request_id, len(chain) - 1)
                    completed += 1
                    piece = self.tokenizer.decode([token])
                    text += piece
                    stop = next((stop for stop in request.sampling.stop if stop in text), None)
                    is_last = position + 1 == request.sampling.max_tokens or stop is not None
                    message = inference_pb2.GenerateResponse(
                        index=index,
                        token_ids=token.to_bytes(4, "little"),
                        text="" if stop is not None else piece + "." * self.faults.padding,
                        finish_reason="stop" if stop is not None else "length" if is_last else "",
                        stop_reason=stop or "",
                    )
                    if request.sampling.HasField("logprobs"):
                        message.logprobs.add(token_id=token, logprob=-0.5, text=piece, utf8=piece.encode())
                    if is_last and index + 1 == request.sampling.n:
                        message.usage.prompt_tokens = len(prompt) - prior
                        message.usage.completion_tokens = completed + prior
                        message.usage.cached_tokens = min(num_cached, len(prompt) - prior)
                    yield message
                    if is_last:
                        break
                output_keys += chain.keys[num_prompt_blocks : (len(chain) - 1) // self.spec.block_size]
            finally:
                self.cache.free(request_id)
                await self.report_events()
        context.set_trailing_metadata(
            (
                ("wf-cached-tokens", str(num_cached)),
                ("wf-event-seq", str(self.cache.last_seq)),
                ("wf-output-keys-bin", b"".join(key.to_bytes(8, "little") for key in output_keys)),
            )
        )

    def _next_token(self, token_ids: Any, seed: int) -> int:
        mixed = zlib.crc32(token_ids[-64:].tobytes(), len(token_ids) + seed % 2**16)
        return int(self.tokenizer.token_to_id(_LETTERS[mixed % len(_LETTERS)]))

    # Redis

    def contract(self) -> common_pb2.Contract:
        return common_pb2.Contract(
            model="m1",
            tokenizer="t1",
            dtype="float32",
            kv_cache_dtype="float32",
            mode="deterministic",
            max_model_len=self.spec.max_model_len,
            hash_algorithm=self.spec.algorithm,
            hash_scheme=self.scheme.fingerprint(),
            block_size=self.spec.block_size,
            served_model_name=self.spec.model_name,
        )

    def lease(self) -> common_pb2.ReplicaLease:
        cache = self.cache
        return common_pb2.ReplicaLease(
            replica=self.spec.replica,
            generation=self.generation,
            heartbeat=self._heartbeat,
            protocol_version=self.spec.protocol_version,
            address=self.address,
            state=self.state,
            contract=self.contract(),
            limits=common_pb2.Limits(max_model_len=self.spec.max_model_len, max_queue=self.spec.max_queue),
            load=common_pb2.Load(
                running=self.running,
                prefill_tokens_per_s=self.spec.prefill_tokens_per_s,
                hung_s=self.faults.hung_s,
                waiting_tokens=self.faults.waiting_tokens,
            ),
            cache=common_pb2.CacheState(
                prefix_caching=self.spec.prefix_caching,
                last_seq=cache.last_seq,
                kv_blocks=self.spec.num_blocks - 1,
                kv_blocks_used=cache.num_used_blocks,
                kv_blocks_cached=cache.num_cached_blocks,
                resident_hashes=cache.num_cached_blocks,
                host_kv_blocks=cache.num_host_blocks,
                host_kv_blocks_cached=cache.num_host_cached_blocks,
            ),
            heartbeat_ms=int(self.spec.heartbeat_s * 1000),
            lease_ms=int(self.spec.lease_s * 1000),
            loras=[self._lora(name) for name in sorted(self.loras)],
        )

    def _key(self, name: str) -> str:
        return f"wf:{{{self.spec.fleet}}}:{name}"

    async def report_events(self) -> None:
        """Write the events made so far; on failure a snapshot stands in for them."""
        self._take_events()
        async with self._reporting:
            if self.faults.is_reporting_paused:
                return
            while self._batches:
                batch = self._batches[0]
                if self.faults.lost_batches:
                    self.faults.lost_batches -= 1
                    self._batches.pop(0)
                    continue
                try:
                    stream = self._key(f"events:{self.spec.replica}:{self.generation}")
                    data = encode_batch(batch)
                    if self.faults.corrupt_batches:
                        self.faults.corrupt_batches -= 1
                        data = b"\x00rubbish"
                    made_ms = time.time_ns() // 1_000_000
                    await self._redis.xadd(stream, {"b": data, "t": made_ms}, id=f"{batch.last_seq}-0", maxlen=4096)
                    await self._redis.pexpire(stream, int(self.spec.lease_s * 10_000))
                except (RedisError, OSError):
                    self._needs_snapshot = True
                    self._batches.clear()
                    return
                self._batches.pop(0)
                self._take_events()

    def _take_events(self) -> None:
        self.cache.take_copies()  # nothing lies in its blocks
        batch = self.cache.take_events()
        if batch is not None:
            self._batches.append(batch)

    async def report(self) -> None:
        """One heartbeat: contract, snapshot where one is needed, events, lease."""
        await self.report_events()
        if self.faults.is_reporting_paused:
            return
        long_ms = int(self.spec.lease_s * 10_000)
        snapshot = self._key(f"snapshot:{self.spec.replica}:{self.generation}")
        if not await self._redis.pexpire(snapshot, long_ms):
            self._needs_snapshot = True  # Redis was emptied
        if await self._redis.delete(self._key(f"wanted:{self.spec.replica}:{self.generation}")):
            self._needs_snapshot = True  # a router has missed something
        if self._needs_snapshot:
            self._needs_snapshot = False
            taken = encode_snapshot(self.cache.snapshot())
            await self._redis.set(snapshot, taken, px=long_ms)
        await self.report_events()  # what the lease tells of stands in the stream, or has been lost
        if self.faults.is_silent:
            return
        self._heartbeat += 1
        lease = self.lease().SerializeToString()
        contract = self.contract().SerializeToString()
        async with self._redis.pipeline(transaction=False) as pipe:
            if not self.spec.own_contract:
                pipe.set(self._key("contract"), contract, px=long_ms, nx=True)
                pipe.pexpire(self._key("contract"), long_ms)
            pipe.set(self._key(f"replica:{self.spec.replica}"), lease, px=int(self.spec.lease_s * 1000))
            pipe.zadd(self._key("replicas"), {self.spec.replica: time.time_ns() // 1_000_000})
            await pipe.execute()

    async def _beat(self) -> None:
        while not self._is_stopped:  # a cancellation that meets a Redis call may be lost in the client
            await asyncio.sleep(self.spec.heartbeat_s)
            try:
                await self.report()
            except (RedisError, OSError):
                self._needs_snapshot = True


async def _run(spec: Spec) -> None:
    worker = await SimulatedWorker(spec).start()
    print(worker.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--id", default="w0")
    parser.add_argument("--fleet", default="default")
    parser.add_argument("--decode-s", type=float, default=0.0)
    flags = parser.parse_args()
    asyncio.run(_run(Spec(flags.redis, replica=flags.id, fleet=flags.fleet, decode_s=flags.decode_s)))
