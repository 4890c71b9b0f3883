"""The Worker service over real gRPC."""

from __future__ import annotations

import asyncio
import threading
from array import array
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from warmfront_pb.v1 import common_pb2, worker_pb2

from cache.block_hash import HashScheme
from tests.fakes.runner import FakeRunner
from tests.support import until
from tests.worker.served import Client, Reply, config_for, serve, unpacked
from worker.batch import SequenceSlice, SliceResult, StepBatch, TokenLogprobs
from worker.replies import MAX_OUTPUT_KEYS, trailing_metadata
from worker.request import Ending, Piece
from worker.service import Mailbox

PROMPT = [100 + index for index in range(40)]


async def test_an_answer_streams_and_ends_with_reason_usage_and_trailing_metadata(valkey_url: str) -> None:
    async with serve(config_for(valkey_url)) as served:
        cold = await served.client.generate(PROMPT, sampling={"max_tokens": 20})
        warm = await served.client.generate(PROMPT, sampling={"max_tokens": 20})
    assert len(unpacked(cold.messages[0].token_ids)) >= 1
    assert len(cold.token_ids) == 20
    assert cold.messages[-1].finish_reason == "length"
    assert [message.HasField("usage") for message in cold.messages] == [False] * (len(cold.messages) - 1) + [True]
    assert (cold.usage.prompt_tokens, cold.usage.completion_tokens, cold.usage.cached_tokens) == (40, 20, 0)
    assert warm.usage.cached_tokens == 32
    assert (cold.token_ids, cold.text) == (warm.token_ids, warm.text)
    assert (cold.trailing["wf-cached-tokens"], warm.trailing["wf-cached-tokens"]) == ("0", "32")
    keys = HashScheme().keys(PROMPT + cold.token_ids[:-1])[2:]
    assert array("Q", warm.trailing["wf-output-keys-bin"]) == keys
    assert int(warm.trailing["wf-event-seq"]) >= 1


async def test_without_prefix_caching_nothing_hits_and_no_keys_are_named(valkey_url: str) -> None:
    async with serve(config_for(valkey_url, enable_prefix_caching=False)) as served:
        replies = [await served.client.generate(PROMPT, sampling={"max_tokens": 20}) for _ in range(2)]
        lease = (await get_replica(served.client)).lease
    assert replies[1].usage.cached_tokens == 0
    assert "wf-output-keys-bin" not in replies[1].trailing
    assert replies[0].token_ids == replies[1].token_ids
    assert not lease.cache.prefix_caching


async def test_choices_are_told_apart_and_only_the_last_message_has_usage(valkey_url: str) -> None:
    async with serve(config_for(valkey_url)) as served:
        reply = await served.client.generate(PROMPT, sampling={"max_tokens": 5, "n": 3})
    by_index = [[m for m in reply.messages if m.index == index] for index in range(3)]
    assert [messages[-1].finish_reason for messages in by_index] == ["length"] * 3
    assert all(sum(len(m.token_ids) // 4 for m in messages) == 5 for messages in by_index)
    assert sum(message.HasField("usage") for message in reply.messages) == 1
    assert reply.usage.completion_tokens == 15


async def test_logprobs_carry_text_and_bytes(valkey_url: str) -> None:
    async with serve(config_for(valkey_url)) as served:
        reply = await served.client.generate(PROMPT, sampling={"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1})
    first = reply.messages[0]
    token_id = unpacked(first.token_ids)[0]
    assert first.logprobs[0].token_id == token_id
    assert first.logprobs[0].utf8 == f"{token_id}.".encode()
    assert len(first.logprobs[0].top) == 2
    assert [one.token_id for one in first.prompt_logprobs] == PROMPT[1:]
    assert reply.usage.cached_tokens == 0


async def test_an_answer_goes_on_from_the_tokens_that_another_replica_delivered(valkey_url: str) -> None:
    async with serve(config_for(valkey_url)) as served:
        whole = await served.client.generate(PROMPT, sampling={"max_tokens": 12})
    async with serve(config_for(valkey_url)) as other:
        rest = await other.client.generate(
            PROMPT + whole.token_ids[:5], sampling={"max_tokens": 12}, num_prior_output_tokens=5
        )
    assert whole.token_ids[:5] + rest.token_ids == whole.token_ids
    assert (rest.usage.prompt_tokens, rest.usage.completion_tokens) == (40, 12)


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"sampling": {"temperature": -1}}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"sampling": {"max_tokens": 0}}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({"lora": "x"}, grpc.StatusCode.NOT_FOUND, "no adapter 'x' is loaded"),
        ({"generation": "0-0"}, grpc.StatusCode.FAILED_PRECONDITION, "generation"),
    ],
)
async def test_a_bad_request_has_its_status_and_harms_nobody(
    valkey_url: str, more: dict[str, Any], status: grpc.StatusCode, words: str
) -> None:
    async with serve(config_for(valkey_url)) as served:
        error = await served.client.fail(PROMPT, **more)
        assert error.code() is status
        assert words in (error.details() or "")
        assert (await served.client.generate(PROMPT, sampling={"max_tokens": 1})).usage.prompt_tokens == 40


async def test_every_call_but_health_needs_the_token(valkey_url: str) -> None:
    async with serve(config_for(valkey_url)) as served:
        stranger = Client(served.address, token="guess")
        error = await stranger.fail(PROMPT)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await get_replica(stranger)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(stranger.channel)
        for name in ("", "warmfront.v1.Worker"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await stranger.channel.close()


async def test_while_the_token_is_changed_the_old_and_the_new_one_count(valkey_url: str) -> None:
    async with serve(config_for(valkey_url, worker_token="the-old-token\n\n the-new-token \n")) as served:
        for token in ("the-old-token", "the-new-token"):
            client = Client(served.address, token=token)
            assert (await client.generate(PROMPT, sampling={"max_tokens": 1})).usage.prompt_tokens == 40
            await client.channel.close()
        for token in ("the-old-token\nthe-new-token", "", "the-old-toke"):
            stranger = Client(served.address, token=token.replace("\n", " "))
            assert (await stranger.fail(PROMPT)).code() is grpc.StatusCode.UNAUTHENTICATED
            await stranger.channel.close()


async def get_replica(client: Client) -> worker_pb2.GetReplicaResponse:
    reply: worker_pb2.GetReplicaResponse = await client.stub.GetReplica(
        worker_pb2.GetReplicaRequest(), metadata=client.metadata
    )
    return reply


async def test_when_the_client_goes_the_request_is_cancelled_within_a_step(valkey_url: str) -> None:
    async with serve(config_for(valkey_url), step_s=0.01) as served:
        call = served.client.start(PROMPT, sampling={"max_tokens": 400})
        await call.read()
        call.cancel()
        await until(lambda: served.worker._service.num_requests == 0)
        steps = len(served.runner.batches)
        await asyncio.sleep(0.1)
        assert len(served.runner.batches) <= steps + 2
        lease = (await get_replica(served.client)).lease
        assert lease.cache.kv_blocks_used == 0
        assert lease.cache.kv_blocks_cached >= 2  # what was computed stays


async def test_the_cache_explains_what_it_has_of_a_prompt(valkey_url: str) -> None:
    """40 tokens are two blocks of 16 and a rest; 10 usable blocks, and a prompt of 150 tokens takes all of them."""
    async with serve(config_for(valkey_url, kv_blocks=11)) as served:

        async def explain(**asked: Any) -> common_pb2.CacheExplanation:
            message = worker_pb2.ExplainCacheRequest(**asked)
            reply: common_pb2.CacheExplanation = await served.client.stub.ExplainCache(
                message, metadata=served.client.metadata
            )
            return reply

        packed = array("I", PROMPT).tobytes()
        assert (await explain(token_ids=packed)).reason == "never_seen"
        assert (await explain(token_ids=packed[:40])).reason == "below_block"
        await served.client.generate(PROMPT, sampling={"max_tokens": 1})
        found = await explain(token_ids=packed)
        assert (found.reason, found.cached_tokens) == ("hit", 32)
        assert (await explain(token_ids=packed, cache_salt="other")).reason == "never_seen"
        await served.client.generate([7] * 150, sampling={"max_tokens": 1}, request_id="the-culprit")
        found = await explain(token_ids=packed)
        assert (found.reason, found.removal_reason, found.evicted_for) == ("evicted", "evicted", "the-culprit")
        assert found.evicted_ago_s >= 0 and found.cached_tokens < 32
        scheme = served.worker._service._engine._cache.scheme  # type: ignore[union-attr]
        key = scheme.chain(array("i", PROMPT), None).keys[found.cached_tokens // 16]
        assert (await explain(missing_key=key)).evicted_for == "the-culprit"
        assert (await explain(missing_key=key + 1)).reason == "never_seen"
        for wrong in (b"", b"abc", array("I", [2**31]).tobytes()):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await explain(token_ids=wrong)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def rest_of(call: Any) -> list[Any]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def test_a_deadline_ends_the_request_in_the_worker_too(valkey_url: str) -> None:
    async with serve(config_for(valkey_url), step_s=0.01) as served:
        error = await served.client.fail(PROMPT, timeout=0.2, sampling={"max_tokens": 400})
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: served.worker._service.num_requests == 0)
        await until(lambda: served.worker._service.lease().cache.kv_blocks_used == 0)


async def test_a_full_queue_answers_resource_exhausted(valkey_url: str) -> None:
    async with serve(config_for(valkey_url, max_num_seqs=1, max_queue=1), step_s=0.02) as served:
        first = served.client.start(PROMPT, sampling={"max_tokens": 400})
        await first.read()
        second = served.client.start(PROMPT, sampling={"max_tokens": 1})
        await until(lambda: served.worker._service.num_requests == 2)
        error = await served.client.fail(PROMPT, sampling={"max_tokens": 1})
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        assert [message async for message in second][-1].finish_reason == "length"


async def test_more_choices_than_the_queue_has_places_are_no_matter_of_patience(valkey_url: str) -> None:
    async with serve(config_for(valkey_url, max_queue=2)) as served:
        error = await served.client.fail(PROMPT, sampling={"max_tokens": 1, "n": 3})
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "n is 3: at most 2 wait here"


async def test_a_poisoned_request_is_an_internal_error_with_trailing_metadata(valkey_url: str) -> None:
    def poison(one: SequenceSlice) -> str | None:
        return "NaN in the scores" if 666 in one.prompt_token_ids and one.start else None

    async with serve(config_for(valkey_url), runner=FakeRunner(201, 16, poison=poison)) as served:
        error = await served.client.fail([*PROMPT, 666], sampling={"max_tokens": 5})
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "NaN in the scores" in (error.details() or "")
        assert dict(error.trailing_metadata())["wf-cached-tokens"] == "0"
        assert len((await served.client.generate(PROMPT, sampling={"max_tokens": 5})).token_ids) == 5


async def test_draining_refuses_new_requests_and_lets_the_running_end(valkey_url: str) -> None:
    async with serve(config_for(valkey_url), step_s=0.01) as served:
        call = served.client.start(PROMPT, sampling={"max_tokens": 40})
        await call.read()
        drained = await served.client.stub.Drain(worker_pb2.DrainWorkerRequest(), metadata=served.client.metadata)
        assert drained.running == 1
        error = await served.client.fail(PROMPT)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "DRAINING" in (error.details() or "")
        messages = await rest_of(call)
        assert messages[-1].finish_reason == "length"
        assert await served.task == 0


async def test_the_drain_deadline_cuts_what_still_runs_as_unavailable(valkey_url: str) -> None:
    async with serve(config_for(valkey_url), step_s=0.01) as served:
        call = served.client.start(PROMPT, sampling={"max_tokens": 450})
        await call.read()
        await served.client.stub.Drain(worker_pb2.DrainWorkerRequest(deadline_ms=50), metadata=served.client.metadata)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rest_of(call)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "wf-cached-tokens" in dict(raised.value.trailing_metadata())
        assert await served.task == 0


async def test_a_warming_replica_takes_synthetic_requests_only(valkey_url: str) -> None:
    async with serve(config_for(valkey_url)) as served:
        served.worker.replica.state = common_pb2.WARMING
        error = await served.client.fail(PROMPT)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (await served.client.generate(PROMPT, synthetic=True, sampling={"max_tokens": 1})).token_ids
        served.worker.replica.state = common_pb2.READY
        warm = await served.client.generate(PROMPT, sampling={"max_tokens": 1})
    assert warm.usage.cached_tokens == 32


async def test_resetting_the_cache_is_refused_while_requests_run(valkey_url: str) -> None:
    async with serve(config_for(valkey_url), step_s=0.01) as served:
        await served.client.generate(PROMPT, sampling={"max_tokens": 1})
        call = served.client.start([1] * 20, sampling={"max_tokens": 400})
        await call.read()
        request = worker_pb2.ResetWorkerCacheRequest()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await served.client.stub.ResetCache(request, metadata=served.client.metadata)
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        call.cancel()
        await until(lambda: served.worker._service.lease().cache.kv_blocks_used == 0)
        reply = await served.client.stub.ResetCache(request, metadata=served.client.metadata)
        assert reply.blocks >= 2
        assert (await served.client.generate(PROMPT, sampling={"max_tokens": 1})).usage.cached_tokens == 0


async def test_the_model_is_described_for_routers_and_the_lease_for_everyone(valkey_url: str) -> None:
    async with serve(config_for(valkey_url, served_model_name="tiny")) as served:
        model = await served.client.stub.GetModel(worker_pb2.GetModelRequest(), metadata=served.client.metadata)
        lease = (await get_replica(served.client)).lease
    assert (model.served_model_name, model.vocab_size, list(model.eos_token_ids)) == ("tiny", 1000, [2])
    assert model.contract == lease.contract
    assert lease.state == common_pb2.READY
    assert lease.address == served.address
    assert lease.limits.max_num_seqs == 32
    assert "seed" not in str(lease)


class StepByStep(FakeRunner):
    """Each step waits until it may be computed."""

    def __init__(self) -> None:
        super().__init__(201, 16)
        self.may_go_on = threading.Semaphore(0)

    def execute(self, batch: StepBatch) -> list[SliceResult]:
        self.may_go_on.acquire()
        return super().execute(batch)


async def test_what_a_step_brings_is_written_before_the_next_one(valkey_url: str) -> None:
    runner = StepByStep()
    async with serve(config_for(valkey_url), runner=runner) as served, asyncio.timeout(60):
        call = served.client.start(PROMPT, sampling={"max_tokens": 4})
        for _ in range(4):
            runner.may_go_on.release()
            assert len((await call.read()).token_ids) == 4
        assert await call.read() is grpc.aio.EOF


def piece(token_id: int, index: int = 0, text: str = "x", reason: str = "") -> Piece:
    logprobs = [TokenLogprobs(token_id=token_id, logprob=-1.0, rank=1)]
    return Piece(index=index, token_ids=[token_id], text=text, logprobs=logprobs, finish_reason=reason)


async def test_what_a_slow_reader_has_not_taken_is_merged_by_choice() -> None:
    mailbox = Mailbox()
    for item in (piece(1), piece(2, index=1), piece(3), piece(4, reason="stop")):
        mailbox.put(item)
    merged = list(mailbox.take())
    assert [(one.index, one.token_ids, one.text, one.finish_reason) for one in merged] == [
        (0, [1, 3, 4], "xxx", "stop"),
        (1, [2], "x", ""),
    ]
    assert [one.token_id for one in merged[0].logprobs] == [1, 3, 4]
    assert not mailbox.pieces


def test_trailing_metadata_stays_under_what_grpc_allows() -> None:
    ending = Ending(
        num_cached_tokens=0, num_output_tokens=0, last_event_seq=1, output_keys=array("Q", range(MAX_OUTPUT_KEYS * 3))
    )
    keys = dict(trailing_metadata(ending))["wf-output-keys-bin"]
    assert len(keys) == MAX_OUTPUT_KEYS * 8
    assert (
        trailing_metadata(Ending(num_cached_tokens=None, num_output_tokens=0, last_event_seq=1, output_keys=array("Q")))
        == ()
    )


async def test_a_very_long_prompt_passes_and_an_oversized_one_is_refused_by_name(valkey_url: str) -> None:
    async with serve(config_for(valkey_url)) as served:
        error = await served.client.fail([1] * 2_000_000)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "2000000 tokens" in (error.details() or "")


async def test_many_requests_at_once_get_what_they_get_alone(valkey_url: str) -> None:
    prompts = [[*PROMPT[: 5 + 3 * index], index] for index in range(12)]
    async with serve(config_for(valkey_url)) as served:
        alone: list[Reply] = [await served.client.generate(one, sampling={"max_tokens": 15}) for one in prompts]
        crowd = await asyncio.gather(*(served.client.generate(one, sampling={"max_tokens": 15}) for one in prompts))
    assert [one.token_ids for one in crowd] == [one.token_ids for one in alone]
    assert [one.text for one in crowd] == [one.text for one in alone]
