"""From a message to a request the engine can trust: every field is checked here, once.

An error names the field and says what to change. What this worker cannot do is refused by name, never ignored.
"""

from __future__ import annotations

import secrets
import sys
from array import array
from collections.abc import Sequence

from warmfront_pb.v1 import inference_pb2, worker_pb2

from cache.adapter import Adapter
from cache.retention import MAX_BREAKPOINTS, MAX_PRIORITY, Retention
from common.limits import (
    DEFAULTS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    RANGES,
    RETENTION_TTLS_S,
    fault_of_prompt_logprobs,
)
from worker.batch import SamplingParams
from worker.replica import ModelCard
from worker.request import Request

_GREEDY_BELOW = 1e-5  # so low a temperature draws the likeliest token, and dividing by it may leave float32's range


class InvalidRequestError(ValueError):
    """A field has a value that cannot be honoured by anyone. Sending it again will not help."""


def read_request(
    message: worker_pb2.WorkerGenerateRequest, card: ModelCard, deadline_s: float, adapter: Adapter | None = None
) -> Request:
    """The request in ``message``; ``adapter`` is the one that it names. Raises ``InvalidRequestError``."""
    if len(message.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt has {len(message.cache_salt)} characters: use 1 to {MAX_SALT_CHARS}, or none"
        )
    sampling = message.sampling
    token_ids = read_token_ids(message.token_ids, card)
    prior = message.num_prior_output_tokens
    prompt_length = len(token_ids) - prior
    if prompt_length < 1:
        raise InvalidRequestError(
            f"num_prior_output_tokens {prior} leaves no prompt of {len(token_ids)} token_ids: it must be smaller"
        )
    max_tokens = _read_max_tokens(sampling, prior, card.max_model_len - prompt_length)
    num_choices = _number(sampling, "n", 1, low=1, high=MAX_CHOICES)
    if prior and (num_choices > 1 or sampling.HasField("prompt_logprobs")):
        raise InvalidRequestError(
            "num_prior_output_tokens: an answer goes on only with n 1 and without prompt_logprobs"
        )
    if sampling.HasField("prompt_logprobs") and (
        fault := fault_of_prompt_logprobs(prompt_length, sampling.prompt_logprobs)
    ):
        raise InvalidRequestError(f"prompt_logprobs {fault}")
    if sampling.min_tokens > max_tokens:
        raise InvalidRequestError(f"min_tokens {sampling.min_tokens} is above max_tokens {max_tokens}: lower it")
    return Request(
        id=message.request_id,
        token_ids=token_ids,
        sampling=_read_sampling(sampling, card.vocab_size),
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        num_choices=num_choices,
        stop_strings=_read_stop_strings(sampling.stop),
        stop_token_ids=frozenset(_in_vocabulary("stop_token_ids", sampling.stop_token_ids, card.vocab_size)),
        ignore_eos=sampling.ignore_eos,
        num_prompt_logprobs=_optional(sampling, "prompt_logprobs", MAX_LOGPROBS),
        adapter=adapter,
        cache_salt=message.cache_salt or None,
        tenant=message.tenant,
        retention=_read_retention(message.retention, prompt_length),
        priority=message.priority,
        deadline_s=deadline_s,
        synthetic=message.synthetic,
        num_prior_output_tokens=prior,
    )


def read_token_ids(packed: bytes, card: ModelCard) -> array[int]:
    """A prompt's token ids, checked. Raises ``InvalidRequestError``."""
    if not packed:
        raise InvalidRequestError("token_ids is empty: a prompt has at least one token")
    if len(packed) % 4:
        raise InvalidRequestError(f"token_ids has {len(packed)} bytes: send 4 per token, little-endian")
    token_ids = unpacked(packed)
    if len(token_ids) >= card.max_model_len:
        raise InvalidRequestError(
            f"token_ids has {len(token_ids)} tokens: this model takes {card.max_model_len} for prompt and answer "
            f"together, so send at most {card.max_model_len - 1}"
        )
    if min(token_ids) < 0 or max(token_ids) >= card.vocab_size:
        _in_vocabulary("token_ids", [token_id & 0xFFFFFFFF for token_id in token_ids], card.vocab_size)
    return token_ids


def unpacked(packed: bytes) -> array[int]:
    """Token ids, typecode "i", from the form in which they are sent: 4 bytes each, little-endian."""
    token_ids = array("i", packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


def _read_max_tokens(sampling: inference_pb2.SamplingParams, prior: int, room: int) -> int:
    """At most what the context leaves; prior output tokens are part of it."""
    if not sampling.HasField("max_tokens"):
        return room
    if sampling.max_tokens < 1:
        raise InvalidRequestError("max_tokens is 0: ask for at least 1")
    if sampling.max_tokens <= prior:
        raise InvalidRequestError(f"max_tokens {sampling.max_tokens}: {prior} prior output tokens leave none to make")
    return min(sampling.max_tokens, room)


def _read_sampling(sampling: inference_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    values = {}
    for name, range_ in RANGES.items():
        values[name] = value = getattr(sampling, name) if sampling.HasField(name) else DEFAULTS[name]
        if not range_.allows(value):
            raise InvalidRequestError(f"{name} is {value:g}: use {range_}")
    if values["temperature"] < _GREEDY_BELOW:
        values["temperature"] = 0.0
    if sampling.top_k > vocab_size:
        raise InvalidRequestError(f"top_k is {sampling.top_k}: the vocabulary has {vocab_size} tokens; 0 means all")
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(f"logit_bias has {len(sampling.logit_bias)} entries: at most {MAX_LOGIT_BIASES}")
    _in_vocabulary("logit_bias", list(sampling.logit_bias), vocab_size)
    for token_id, bias in sampling.logit_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidRequestError(f"logit_bias of token {token_id} is {bias:g}: it must be between -100 and 100")
    return SamplingParams(
        **values,
        top_k=sampling.top_k,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        num_logprobs=_optional(sampling, "logprobs", MAX_LOGPROBS),
    )


def _read_retention(marks: Sequence[inference_pb2.Retention], prompt_length: int) -> tuple[Retention, ...]:
    if len(marks) > MAX_BREAKPOINTS:
        raise InvalidRequestError(f"retention has {len(marks)} breakpoints: at most {MAX_BREAKPOINTS}")
    for mark in marks:
        if not 1 <= mark.tokens <= prompt_length:
            raise InvalidRequestError(f"retention.tokens is {mark.tokens}: the prompt has {prompt_length} tokens")
        if mark.ttl_s not in RETENTION_TTLS_S:
            raise InvalidRequestError(f"retention.ttl_s is {mark.ttl_s}: use {' or '.join(map(str, RETENTION_TTLS_S))}")
        if not 0 <= mark.priority <= MAX_PRIORITY:
            raise InvalidRequestError(f"retention.priority is {mark.priority}: use 0 to {MAX_PRIORITY}")
    return tuple(Retention(mark.tokens, float(mark.ttl_s), mark.priority) for mark in marks)


def _read_stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
    if len(strings) > MAX_STOPS:
        raise InvalidRequestError(f"stop has {len(strings)} strings: at most {MAX_STOPS}")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARS:
            raise InvalidRequestError(f"stop has a string of {len(string)} characters: use 1 to {MAX_STOP_CHARS}")
    return tuple(strings)


def _in_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> Sequence[int]:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidRequestError(f"{field} has token {token_id}: the vocabulary ends at {vocab_size - 1}")
    return token_ids


def _number(sampling: inference_pb2.SamplingParams, field: str, default: int, *, low: int, high: int) -> int:
    value: int = getattr(sampling, field) if sampling.HasField(field) else default
    if not low <= value <= high:
        raise InvalidRequestError(f"{field} is {value}: it must be between {low} and {high}")
    return value


def _optional(sampling: inference_pb2.SamplingParams, field: str, high: int) -> int | None:
    return _number(sampling, field, 0, low=0, high=high) if sampling.HasField(field) else None
