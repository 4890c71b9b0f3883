from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from warmfront_pb.v1 import inference_pb2, worker_pb2

from worker.intake import InvalidRequestError, read_request
from worker.replica import ModelCard
from worker.request import Request

CARD = ModelCard(
    name="fake",
    model_fingerprint="m",
    tokenizer_fingerprint="t",
    tokenizer_json="{}",
    dtype="float32",
    vocab_size=1000,
    max_model_len=100,
    kv_bytes_per_token=8,
)


def packed(*token_ids: int) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def message(**more: Any) -> worker_pb2.WorkerGenerateRequest:
    fields: dict[str, Any] = {"request_id": "r", "token_ids": packed(*range(10))}
    return worker_pb2.WorkerGenerateRequest(**{**fields, **more})


def sampling(**fields: Any) -> worker_pb2.WorkerGenerateRequest:
    return message(sampling=inference_pb2.SamplingParams(**fields))


def read(given: worker_pb2.WorkerGenerateRequest) -> Request:
    return read_request(given, CARD, float("inf"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: message(token_ids=b""), "token_ids is empty"),
        (lambda: message(token_ids=b"123"), "token_ids has 3 bytes: send 4 per token"),
        (lambda: message(token_ids=packed(1, 1000)), "token_ids has token 1000: the vocabulary ends at 999"),
        (lambda: message(token_ids=packed(2**32 - 1)), "token_ids has token 4294967295"),
        (lambda: message(token_ids=packed(*[1] * 100)), "token_ids has 100 tokens.*at most 99"),
        (lambda: message(num_prior_output_tokens=10), "num_prior_output_tokens 10 leaves no prompt"),
        (lambda: message(cache_salt="s" * 257), "cache_salt has 257 characters"),
        (lambda: sampling(max_tokens=0), "max_tokens is 0"),
        (lambda: sampling(temperature=-1), "temperature is -1: use 0 to 2"),
        (lambda: sampling(temperature=float("nan")), "temperature is nan"),
        (lambda: sampling(top_p=0), "top_p is 0: use over 0 to 1"),
        (lambda: sampling(top_p=1.5), "top_p is 1.5"),
        (lambda: sampling(min_p=-0.5), "min_p is -0.5"),
        (lambda: sampling(top_k=5000), "top_k is 5000.*1000 tokens"),
        (lambda: sampling(repetition_penalty=0), "repetition_penalty is 0: use 0.01 to 10"),
        (lambda: sampling(repetition_penalty=1e-38), "repetition_penalty is 1e-38"),
        (lambda: sampling(repetition_penalty=float("inf")), "repetition_penalty is inf"),
        (lambda: sampling(presence_penalty=3), "presence_penalty is 3"),
        (lambda: sampling(frequency_penalty=-3), "frequency_penalty is -3"),
        (lambda: sampling(logit_bias={1000: 1.0}), "logit_bias has token 1000"),
        (lambda: sampling(logit_bias={1: 101.0}), "logit_bias of token 1 is 101"),
        (lambda: sampling(n=0), "n is 0: it must be between 1 and 16"),
        (lambda: sampling(n=17), "n is 17"),
        (lambda: sampling(stop=["x"] * 17), "stop has 17 strings"),
        (lambda: sampling(stop=[""]), "stop has a string of 0 characters"),
        (lambda: sampling(stop_token_ids=[1000]), "stop_token_ids has token 1000"),
        (lambda: sampling(max_tokens=3, min_tokens=4), "min_tokens 4 is above max_tokens 3"),
        (lambda: sampling(logprobs=21), "logprobs is 21: it must be between 0 and 20"),
        (lambda: sampling(prompt_logprobs=21), "prompt_logprobs is 21"),
        (
            lambda: message(num_prior_output_tokens=3, sampling=inference_pb2.SamplingParams(max_tokens=3)),
            "max_tokens 3: 3 prior output tokens leave none",
        ),
        (
            lambda: message(num_prior_output_tokens=3, sampling=inference_pb2.SamplingParams(n=2)),
            "num_prior_output_tokens: .* n 1",
        ),
        (lambda: message(retention=[inference_pb2.Retention(tokens=11, ttl_s=300)]), "retention.tokens is 11"),
        (lambda: message(retention=[inference_pb2.Retention(tokens=1, ttl_s=7)]), "retention.ttl_s is 7"),
        (lambda: message(retention=[inference_pb2.Retention(tokens=1, ttl_s=300, priority=-1)]), "retention.priority"),
        (lambda: message(retention=[inference_pb2.Retention(tokens=1, ttl_s=300)] * 5), "retention has 5"),
    ],
)
def test_a_bad_field_is_named_with_what_to_change(
    make: Callable[[], worker_pb2.WorkerGenerateRequest], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read(make())


def test_log_probabilities_of_a_long_prompt_are_refused_where_they_would_be_more_than_one_message_holds() -> None:
    card = replace(CARD, max_model_len=50_000)
    for num_tokens, alternatives in ((11_904, 20), (41_666, 5), (11_905, 20)):
        given = message(
            token_ids=packed(*[1] * num_tokens), sampling=inference_pb2.SamplingParams(prompt_logprobs=alternatives)
        )
        if num_tokens * (1 + alternatives) <= 250_000:
            assert read_request(given, card, float("inf")).num_prompt_logprobs == alternatives
        else:
            with pytest.raises(InvalidRequestError, match=r"of 11905 prompt tokens .* 250005: ask for 250000 at most"):
                read_request(given, card, float("inf"))


def test_unset_fields_have_the_defaults_that_the_proto_names() -> None:
    request = read(message())
    assert request.max_tokens == 90  # what the context leaves
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert request.num_choices == 1
    assert request.sampling.num_logprobs is None
    assert request.cache_salt is None


def test_zero_is_a_value_and_not_unset() -> None:
    request = read(sampling(temperature=0, logprobs=0, prompt_logprobs=0, seed=0))
    assert request.sampling.temperature == 0
    assert (request.sampling.num_logprobs, request.num_prompt_logprobs, request.sampling.seed) == (0, 0, 0)


def test_a_temperature_next_to_zero_is_greedy_since_nothing_else_can_be_told_from_it() -> None:
    assert [read(sampling(temperature=value)).sampling.temperature for value in (1e-38, 9e-6, 0.5)] == [0, 0, 0.5]


def test_the_least_and_the_most_of_a_range_are_in_it() -> None:
    for value in (0.01, 10):
        assert read(sampling(repetition_penalty=value)).sampling.repetition_penalty == pytest.approx(value)


def test_max_tokens_is_cut_to_what_the_context_leaves_prior_tokens_included() -> None:
    assert read(sampling(max_tokens=5000)).max_tokens == 90
    going_on = message(num_prior_output_tokens=4, sampling=inference_pb2.SamplingParams(max_tokens=5000))
    assert read(going_on).max_tokens == 94


def test_token_ids_are_little_endian_and_each_request_without_a_seed_draws_one() -> None:
    assert list(read(message(token_ids=bytes([1, 0, 0, 0, 231, 3, 0, 0]))).token_ids) == [1, 999]
    assert read(message()).sampling.seed != read(message()).sampling.seed
