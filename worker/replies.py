"""From what engine, cache and adapters say to messages on the wire: the way back from ``worker.intake``."""

from __future__ import annotations

from warmfront_pb.v1 import common_pb2, inference_pb2

from cache.prefix_cache import Explanation
from worker.adapters import LoadedAdapter
from worker.batch import TokenLogprobs
from worker.detokenizer import TokenTable
from worker.request import Ending, Piece, Request

MAX_OUTPUT_KEYS = 512  # trailing metadata must stay under gRPC's 8 KiB


def trailing_metadata(ending: Ending) -> tuple[tuple[str, str | bytes], ...]:
    """What a router learns when a request that got blocks ends; nothing for one that never did."""
    if ending.num_cached_tokens is None:
        return ()
    entries: list[tuple[str, str | bytes]] = [
        ("wf-cached-tokens", str(ending.num_cached_tokens)),
        ("wf-event-seq", str(ending.last_event_seq)),
    ]
    if ending.output_keys:
        keys = ending.output_keys[:MAX_OUTPUT_KEYS]
        entries.append(("wf-output-keys-bin", b"".join(key.to_bytes(8, "little") for key in keys)))
    return tuple(entries)


def usage_of(request: Request, ending: Ending) -> inference_pb2.Usage:
    """Tokens of a whole answer; prior output of another replica is no part of the prompt."""
    prompt_tokens = len(request.token_ids) - request.num_prior_output_tokens
    return inference_pb2.Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=ending.num_output_tokens,
        cached_tokens=min(ending.num_cached_tokens or 0, prompt_tokens),
    )


def explanation_of(found: Explanation, now: float) -> common_pb2.CacheExplanation:
    """Why a prompt finds what it finds; ``now`` is ``time.monotonic()``."""
    explanation = common_pb2.CacheExplanation(
        reason=found.reason, cached_tokens=found.num_matched_tokens, coming_tokens=found.num_pending_tokens
    )
    if (eviction := found.eviction) is not None:
        explanation.evicted_ago_s = max(0.0, now - eviction.time_s)
        explanation.idle_s = eviction.idle_s
        explanation.removal_reason = eviction.reason.name.lower()
        explanation.evicted_for = str(eviction.culprit).rsplit("#", 1)[0]  # a choice's id
    return explanation


def message_of(piece: Piece, table: TokenTable) -> inference_pb2.GenerateResponse:
    """What was added to one choice."""
    message = inference_pb2.GenerateResponse(
        index=piece.index,
        token_ids=b"".join([token_id.to_bytes(4, "little") for token_id in piece.token_ids]),
        text=piece.text,
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
    )
    if piece.logprobs:
        message.logprobs.extend(_logprobs(one, table) for one in piece.logprobs)
    if piece.prompt_logprobs:
        message.prompt_logprobs.extend(_logprobs(one, table) for one in piece.prompt_logprobs)
    return message


def lora_of(loaded: LoadedAdapter) -> common_pb2.LoadedLora:
    """An adapter as leases and answers name it."""
    return common_pb2.LoadedLora(name=loaded.adapter.name, version=loaded.adapter.version, rank=loaded.rank)


def _logprobs(one: TokenLogprobs, table: TokenTable) -> inference_pb2.Logprobs:
    return inference_pb2.Logprobs(
        token_id=one.token_id,
        logprob=one.logprob,
        text=table.text_of(one.token_id),
        utf8=table.bytes_of(one.token_id),
        top=[
            inference_pb2.TopLogprob(
                token_id=token_id, logprob=logprob, text=table.text_of(token_id), utf8=table.bytes_of(token_id)
            )
            for token_id, logprob in one.top
        ],
    )
