"""OpenAI's request and answer objects, to and from our own messages. Plain data, no network.

A body becomes one ``GenerateRequest`` per prompt. Fields are of four kinds: those that are honoured, those that change
nothing here and are let through, those that are known and not offered (``router.not_offered``: refused by name where
they ask for something), and unknown ones (refused by name too: a request that silently loses a field is worse than one
that fails).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct
from warmfront_pb.v1 import inference_pb2

from common.limits import MAX_CHOICES
from router import not_offered
from router.errors import InvalidRequestError, UnsupportedError
from router.segments import pack_ids

MAX_PROMPTS = 64
ROLES = ("system", "developer", "user", "assistant")
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

Count = Annotated[int, Meta(ge=0, le=2**32 - 1)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**32 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Ignored = Any


class StreamOptions(Struct):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's; not offered


class ContentPart(Struct):
    """A part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class Message(Struct):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: Ignored = None
    refusal: Ignored = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class RetentionSpec(Struct):
    """Keep the first ``tokens`` of the prompt for ``ttl``."""

    tokens: AtLeastOne
    ttl: int | Literal["5m", "1h"] = 300
    priority: Priority = 0


class _Common(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    seed: Seed | None = None
    n: AtLeastOne | None = None
    stop: str | list[str] | None = None
    max_tokens: AtLeastOne | None = None

    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    return_token_ids: bool | None = None
    priority: Priority | None = None
    lora: str | None = None
    retention: list[RetentionSpec] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**32 - 1)] | None = None  # -1: all, as in vLLM
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[TokenId] | None = None

    # They change nothing here.
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: str | None = None  # `hint` says what for
    session_id: str | None = None  # vLLM's
    prompt_cache_retention: Ignored = None

    # Internal to router and worker: never taken from a client.
    request_id: Ignored = None
    generation: Ignored = None
    synthetic: Ignored = None
    tenant: Ignored = None
    num_prior_output_tokens: Ignored = None

    @property
    def hint(self) -> str:
        """What it says its requests have in common, for where no header says it."""
        return self.session_id or self.prompt_cache_key or ""


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    parallel_tool_calls: Ignored = None
    verbosity: Ignored = None
    prediction: Ignored = None


class CompletionBody(_Common):
    """POST /v1/completions."""

    prompt: Raw
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None


Body = TypeVar("Body", ChatBody, CompletionBody)
_T = TypeVar("_T")


def decode(data: bytes, kind: type[_T]) -> _T:
    """JSON as an object: the one way for whatever a client sends.

    Raises ``msgspec.DecodeError`` or ``UnicodeDecodeError``, and ``InvalidRequestError`` for what is nested deeper
    than Python's stack, in fields that are skipped too.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply: use fewer levels of lists and objects") from None


def parse(body: bytes, kind: type[Body]) -> Body:
    """The body as an object. Raises ``InvalidRequestError`` naming the field."""
    if not body:
        raise InvalidRequestError("the body is empty: send a JSON object")
    try:
        body.decode()  # what is kept raw is not looked at below
        try:
            return decode(body, kind)
        except msgspec.ValidationError:
            fields = decode(body, dict[str, Raw])
        others = not_offered.without(fields, not_offered.CHAT if kind is ChatBody else not_offered.COMPLETION)
        return decode(msgspec.json.encode(others), kind)
    except msgspec.ValidationError as error:
        raise _invalid_body(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not valid UTF-8: {error}") from None


def parse_explain(body: bytes) -> int | str | tuple[inference_pb2.GenerateRequest, str]:
    """What ``POST /v1/explain`` is asked: the last so many, a request's id, or a request and its session.

    Raises ``RouterError``.
    """
    try:
        body.decode()
        fields = decode(body, dict[str, Raw])
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not a JSON object: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not valid UTF-8: {error}") from None
    if "messages" in fields:
        chat = parse(body, ChatBody)
        return chat_request(chat), chat.hint
    if "prompt" in fields:
        completion = parse(body, CompletionBody)
        requests = completion_requests(completion)
        if len(requests) > 1:
            raise InvalidRequestError(f"prompt has {len(requests)} entries: ask about one at a time", param="prompt")
        return requests[0], completion.hint
    try:
        which = decode(body, _Which)
    except msgspec.ValidationError as error:
        raise _invalid_body(str(error)) from None
    if which.request_id:
        return which.request_id
    if which.last:
        return which.last
    raise InvalidRequestError("give the body of a completion, a request_id or last")


class _Which(Struct, forbid_unknown_fields=True):
    request_id: str = ""
    last: Count = 0


def chat_request(body: ChatBody) -> inference_pb2.GenerateRequest:
    """Our message for a chat. Raises ``RouterError``."""
    if body.add_generation_prompt is not None and body.add_generation_prompt == bool(body.continue_final_message):
        raise InvalidRequestError(
            "add_generation_prompt must be the opposite of continue_final_message: leave it out",
            param="add_generation_prompt",
        )
    if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens differ: give max_completion_tokens alone", param="max_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    request = _request(body)
    request.chat.continue_final_message = bool(body.continue_final_message)
    for index, message in enumerate(body.messages):
        param = f"messages[{index}].role"
        if message.role in ("tool", "function"):
            raise UnsupportedError(
                f"{param} {message.role!r}: tool calls are not supported by this version", param=param
            )
        if message.role not in ROLES:
            raise InvalidRequestError(f"{param} is {message.role[:64]!r}: use one of {', '.join(ROLES)}", param=param)
        request.chat.messages.add(role=message.role, content=_content(message, f"messages[{index}]"))
    if not body.messages:
        raise InvalidRequestError("messages is empty: give at least one message", param="messages")
    if body.max_completion_tokens is not None:
        request.sampling.max_tokens = body.max_completion_tokens
    if body.logprobs:
        request.sampling.logprobs = body.top_logprobs or 0
    return request


def completion_requests(body: CompletionBody) -> list[inference_pb2.GenerateRequest]:
    """Our messages, one per prompt. Raises ``RouterError``."""
    if body.best_of not in (None, 1, body.n or 1):
        raise not_offered.unsupported("best_of")
    requests = []
    for prompt in _prompts(body.prompt):
        request = _request(body)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids = pack_ids(prompt)
        if body.max_tokens is None:
            request.sampling.max_tokens = _COMPLETION_MAX_TOKENS
        if body.logprobs is not None:
            request.sampling.logprobs = body.logprobs
        requests.append(request)
    return requests


def usage_json(usages: Sequence[inference_pb2.Usage]) -> dict[str, Any]:
    """The sum over a body's prompts."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def chat_logprobs_json(logprobs: Sequence[inference_pb2.Logprobs]) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice."""
    return {
        "content": [
            {**_logprob_json(one), "top_logprobs": [_logprob_json(other) for other in one.top]} for one in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs_json(logprobs: Sequence[inference_pb2.Logprobs], offset: int) -> dict[str, Any]:
    """The ``logprobs`` of a completion choice; ``offset`` is the number of characters before these tokens.

    As with OpenAI, ``top_logprobs`` has the sampled token too where it is none of the top ones.
    """
    offsets = []
    for one in logprobs:
        offsets.append(offset)
        offset += len(one.text)
    return {
        "tokens": [one.text for one in logprobs],
        "token_logprobs": [one.logprob for one in logprobs],
        "top_logprobs": [
            {one.text: one.logprob, **{other.text: other.logprob for other in one.top}} for one in logprobs
        ],
        "text_offset": offsets,
    }


def _request(body: _Common) -> inference_pb2.GenerateRequest:
    if body.stream_options is not None:
        if not body.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if body.stream_options.continuous_usage_stats:
            raise not_offered.unsupported("stream_options.continuous_usage_stats")
    if body.n is not None and body.n > MAX_CHOICES:
        raise InvalidRequestError(f"n is {body.n}: use 1 to {MAX_CHOICES}", param="n")
    request = inference_pb2.GenerateRequest(
        model=body.model or "", cache_salt=body.cache_salt or "", priority=body.priority or 0, lora=body.lora or ""
    )
    for one in body.retention or ():
        ttl_s = one.ttl if isinstance(one.ttl, int) else {"5m": 300, "1h": 3600}[one.ttl]
        if not 0 <= ttl_s < 2**32:
            raise InvalidRequestError(f"retention has a ttl of {ttl_s} s: use 300 or 3600", param="retention")
        request.retention.add(tokens=one.tokens, ttl_s=ttl_s, priority=one.priority)
    sampling = request.sampling
    for name in (
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "n", "max_tokens", "min_p"),
        *("repetition_penalty", "min_tokens"),
    ):
        value = getattr(body, name)
        if value is not None:
            setattr(sampling, name, value)
    if body.top_k is not None:
        sampling.top_k = max(0, body.top_k)
    if body.seed is not None:
        sampling.seed = body.seed % 2**64
    for token_id, bias in (body.logit_bias or {}).items():
        sampling.logit_bias[token_id] = bias
    sampling.ignore_eos = bool(body.ignore_eos)
    sampling.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop or ())
    sampling.stop_token_ids.extend(body.stop_token_ids or ())
    return request


def _content(message: Message, where: str) -> str:
    if message.tool_calls or message.tool_call_id is not None or message.function_call is not None:
        raise UnsupportedError(f"{where}: tool calls are not supported by this version", param=where)
    if message.audio is not None:
        raise UnsupportedError(f"{where}.audio is not supported by this version", param=where)
    if message.content is None and message.role == "assistant":
        return ""  # OpenAI's answers have null where an assistant said nothing
    if message.content is None:
        raise InvalidRequestError(f"{where}.content is missing: give a string", param=where)
    if isinstance(message.content, str):
        return message.content
    texts = []
    for number, part in enumerate(message.content):
        if part.type not in ("text", "input_text"):
            raise UnsupportedError(f"{where}: content of type {part.type!r} is not supported: use text", param=where)
        if part.text is None:
            param = f"{where}.content[{number}].text"
            raise InvalidRequestError(f"{param} is missing: give a string", param=param)
        texts.append(part.text)
    return "".join(texts)


def _prompts(raw: Raw) -> list[str | list[int]]:
    data = bytes(raw)
    prompts: list[str | list[int]] = []
    kinds: list[Any] = [str, list[TokenId], list[str], list[list[TokenId]]]
    for kind in kinds:
        try:
            value = decode(data, kind)
        except msgspec.DecodeError:
            continue
        prompts = [value] if kind is str or (kind is kinds[1] and value) else value
        break
    else:
        raise InvalidRequestError(
            "prompt: give a string, a list of strings, a list of token ids or a list of lists of token ids "
            "(0 to 2147483647)",
            param="prompt",
        )
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt is empty: give at least one token", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt has {len(prompts)} entries: use at most {MAX_PROMPTS}", param="prompt")
    return prompts


def _invalid_body(text: str) -> InvalidRequestError:
    """msgspec says "what - at `$.path`"; the client reads "path: what"."""
    what, _, path = text.partition(" - at `")
    _, is_key, path = path.rstrip("`").rpartition("key` in `")
    param = path.removeprefix("$.").removeprefix("$") or None
    if what.startswith("Object contains unknown field"):
        name = what.split("`")[1]
        param = f"{param}.{name}" if param else name
        return InvalidRequestError(f"{param} is not a field of this request: leave it out", param=param)
    if what.startswith("Object missing required field"):
        name = what.split("`")[1]
        param = f"{param}.{name}" if param else name
        return InvalidRequestError(f"{param} is missing", param=param)
    where = f"{param}, a key" if is_key else param
    return InvalidRequestError(f"{where}: {what[0].lower()}{what[1:]}" if param else what, param=param)


def _logprob_json(one: inference_pb2.Logprobs | inference_pb2.TopLogprob) -> Mapping[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.utf8)}
