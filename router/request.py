"""From what a client asks to what a worker is told: checks every value once and fills in every default.

Both fronts speak ``GenerateRequest``; HTTP bodies become one first. Errors name the field and what to change.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from warmfront_pb.v1 import inference_pb2, worker_pb2

from common.limits import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_RETENTIONS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    RANGES,
    RETENTION_TTLS_S,
    fault_of_prompt_logprobs,
)
from router.errors import TOO_LONG, InvalidRequestError, NotFoundError
from router.tokenizer import ModelProfile

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")  # templates write it as it is: nothing that is markup


@dataclass(slots=True, kw_only=True)
class Work:
    """A checked request, ready to be placed."""

    request_id: str
    call: worker_pb2.WorkerGenerateRequest  # complete but for the generation
    token_ids: bytes  # the call's: a message copies them each time it is asked
    num_tokens: int  # of the prompt
    arrived_s: float  # on the monotonic clock
    timeout_s: float  # from there
    session: str = ""


def check(request: inference_pb2.GenerateRequest, model: ModelProfile) -> None:
    """All that can be checked before the prompt is tokens, but for its adapter. Raises ``RouterError``."""
    if request.WhichOneof("prompt") is None:
        raise _invalid("prompt", "is missing: give text, token_ids or chat")
    if request.HasField("chat"):
        _check_chat(request.chat)
    if len(request.cache_salt) > MAX_SALT_CHARS:
        raise _invalid("cache_salt", f"has {len(request.cache_salt)} characters: use 1 to {MAX_SALT_CHARS}")
    if len(request.retention) > MAX_RETENTIONS:
        raise _invalid("retention", f"has {len(request.retention)} breakpoints: use at most {MAX_RETENTIONS}")
    for breakpoint_ in request.retention:
        if breakpoint_.ttl_s not in RETENTION_TTLS_S:
            raise _invalid("retention", f"has a ttl of {breakpoint_.ttl_s} s: use 300 or 3600")
        if not breakpoint_.tokens:
            raise _invalid("retention", "has a breakpoint at 0 tokens: use at least 1")
    _check_sampling(request.sampling, model)


async def prompt_ids(request: inference_pb2.GenerateRequest, model: ModelProfile) -> bytes:
    """The prompt as packed token ids, checked. Raises ``InvalidRequestError``."""
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        packed = request.token_ids
        if len(packed) % 4:
            raise _invalid("token_ids", f"has {len(packed)} bytes: pack each id as 4 bytes, little-endian")
    elif kind == "text":
        packed = await model.text_ids(request.text)
    else:
        packed = await model.chat_ids(request.chat)
    name = "messages" if kind == "chat" else "prompt"  # as HTTP calls them; over gRPC the group of the two is "prompt"
    if not packed:
        raise _invalid(name, "is empty: give at least one token")
    num_tokens = len(packed) // 4
    if num_tokens >= model.max_model_len:
        raise _invalid(
            name,
            f"has {num_tokens} tokens and the context {model.max_model_len}: shorten it to leave room to answer",
            TOO_LONG,
        )
    if kind == "token_ids":
        highest = int(np.maximum.reduce(np.frombuffer(packed, dtype="<u4")))
        if highest >= model.vocab_size:
            raise _invalid(name, f"has id {highest}: the vocabulary ends at {model.vocab_size - 1}")
    return packed


def complete_sampling(
    asked: inference_pb2.SamplingParams, model: ModelProfile, num_tokens: int, rng: random.Random
) -> inference_pb2.SamplingParams:
    """``asked`` with every default filled in. Raises ``InvalidRequestError``."""
    sampling = inference_pb2.SamplingParams()
    sampling.CopyFrom(model.defaults)
    sampling.MergeFrom(asked)
    room = model.max_model_len - num_tokens
    if not asked.HasField("max_tokens"):
        sampling.max_tokens = min(room, model.defaults.max_tokens) if model.defaults.HasField("max_tokens") else room
    elif asked.max_tokens > room:
        raise _invalid(
            "max_tokens",
            f"is {asked.max_tokens}, but the prompt's {num_tokens} tokens leave {room} of the context's "
            f"{model.max_model_len}: ask for fewer or shorten the prompt",
            TOO_LONG,
        )
    if sampling.min_tokens > sampling.max_tokens:
        raise _invalid("min_tokens", f"is {sampling.min_tokens}, over max_tokens {sampling.max_tokens}: lower it")
    if sampling.HasField("prompt_logprobs") and (
        fault := fault_of_prompt_logprobs(num_tokens, sampling.prompt_logprobs)
    ):
        raise _invalid("prompt_logprobs", fault)
    if not sampling.HasField("seed"):
        sampling.seed = rng.getrandbits(63)
    return sampling


def _check_chat(chat: inference_pb2.Chat) -> None:
    if not chat.messages:
        raise _invalid("messages", "is empty: give at least one message")
    for index, message in enumerate(chat.messages):
        if not _ROLE.fullmatch(message.role):
            raise _invalid(f"messages[{index}].role", "is missing or no name: use system, user or assistant")


def _check_sampling(sampling: inference_pb2.SamplingParams, model: ModelProfile) -> None:
    for field, value in sampling.ListFields():  # those that are given: most requests have three
        fault = _fault_of(field.name, value, model.vocab_size)
        if fault:
            raise _invalid(field.name, fault)


def _fault_of(name: str, value: Any, vocab_size: int) -> str:
    """What is wrong with a given parameter; empty where nothing is."""
    range_ = RANGES.get(name)
    if range_ is not None:
        return "" if range_.allows(value) else f"is {value:g}: use {range_}"
    match name:
        case "max_tokens" if not value:
            return "is 0: use at least 1"
        case "n" if not 1 <= value <= MAX_CHOICES:
            return f"is {value}: use 1 to {MAX_CHOICES}"
        case "logprobs" | "prompt_logprobs" if value > MAX_LOGPROBS:
            return f"is {value}: use 0 to {MAX_LOGPROBS}"
        case "stop":
            if len(value) > MAX_STOPS:
                return f"has {len(value)} strings: use at most {MAX_STOPS}"
            for stop in value:
                if not 0 < len(stop) <= MAX_STOP_CHARS:
                    return f"has a string of {len(stop)} characters: use 1 to {MAX_STOP_CHARS}"
        case "stop_token_ids" | "logit_bias":
            for token_id in value:
                if token_id >= vocab_size:
                    return f"has id {token_id}: the vocabulary ends at {vocab_size - 1}"
            for token_id, bias in value.items() if name == "logit_bias" else ():
                if not -100 <= bias <= 100:
                    return f"has {bias:g} for token {token_id}: use -100 to 100"
    return ""


def model_not_found(name: str, served: str, adapters: Sequence[str] = ()) -> NotFoundError:
    """For a request that names neither the model that is served nor one of its adapters."""
    names = " or ".join(map(repr, (served, *adapters)))
    return NotFoundError(f"model {name!r} is not served here: use {names}", param="model", code="model_not_found")


def _invalid(param: str, text: str, code: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {text}", param=param, code=code)
