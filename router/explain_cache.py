"""Asks the replica of a decision what its cache had to do with it: blocks never seen, or evicted when and for whom."""

from __future__ import annotations

import logging
import time

from warmfront_pb.v1 import common_pb2, worker_pb2

from router.explain import RecentDecisions, Record
from router.fleet import Fleet
from router.worker_client import WorkerError

log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0


async def explain_past(fleet: Fleet, recent: RecentDecisions, request_id: str) -> Record:
    """The newest decision for a request, and why its replica had to compute what it did. Raises ``NotFoundError``."""
    record = recent.of(request_id)
    if record.missing_key is None or record.cache is not None:
        return record
    found = await ask_cache(fleet, record, worker_pb2.ExplainCacheRequest(missing_key=record.missing_key))
    if found is not None:
        if found.reason == "evicted" and found.evicted_ago_s < time.time() - record.decided_at_s:
            found = common_pb2.CacheExplanation(reason="unknown")
        found.cached_tokens = record.cached_tokens or 0
        record.cache = found
    return record


async def ask_cache(
    fleet: Fleet, record: Record, asked: worker_pb2.ExplainCacheRequest
) -> common_pb2.CacheExplanation | None:
    """What the chosen replica says; None where it has left, cannot say, or does not say it soon."""
    if record.decision is None:
        return None
    member = fleet.members.get(record.decision.chosen.replica)
    if member is None or member.replica.generation != record.generation:
        return None
    try:
        return await member.client.explain_cache(asked, _TIMEOUT_S)
    except WorkerError as error:
        log.debug("a replica does not explain its cache replica=%s error=%r", member.replica.id, error.message)
        return None
