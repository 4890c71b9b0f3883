"""Why a request went where it went, in the terms of its decision's cost.

A decision is kept as it was taken (ids, counts and costs, no prompt) and put into words only when somebody asks, so
that keeping it costs the request next to nothing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from google.protobuf import json_format
from google.protobuf.message import Message
from warmfront_pb.v1 import admin_pb2, common_pb2

from cache.prefix_index import Depths
from router.errors import NotFoundError
from router.policy import Candidate, Cost, Decision, marginal_costs

_MAX_RECORDS = 256
_NOTHING = Depths(0, 0)
_MAX_METADATA_BYTES = 4096  # gRPC's clients refuse trailing metadata from 8 KiB on


class Absence(NamedTuple):
    """Why a replica could not be chosen."""

    state: str  # as in its lease
    reason: str
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class Record:
    """One decision as it was taken, and what came of it."""

    request_id: str
    decided_at_s: float  # seconds since 1970
    policy: str
    num_tokens: int
    num_blocks: int  # that were looked up
    block_size: int
    num_retries: int
    decision: Decision | None  # None: nobody was eligible
    absent: Mapping[str, Absence]  # not ready
    passed_over: Mapping[str, Absence]  # ready, but not for this request
    held: Mapping[str, Depths] = field(default_factory=dict)  # leading blocks of the prompt that these two kinds hold
    eligible: Mapping[str, object]  # replica ids
    cached_tokens: int | None = None
    ttft_s: float | None = None
    overhead_s: float = 0.0  # that a first token takes beside its prompt's tokens, as was known then
    queue_s: float = 0.0  # held back by the router before it was sent
    would_wait: bool = False  # asked about, not sent: the chosen replica is full
    generation: str = ""  # of the chosen replica
    missing_key: int | None = None  # of the first block that it had to compute and could have had
    cache: common_pb2.CacheExplanation | None = None  # what it says of its cache, once it was asked


class RecentDecisions:
    """The newest decisions of a router."""

    def __init__(self, max_records: int = _MAX_RECORDS) -> None:
        self._records: deque[Record] = deque(maxlen=max_records)

    def add(self, record: Record) -> None:
        """Keep it; the oldest is forgotten."""
        self._records.append(record)

    def last(self, count: int) -> list[Record]:
        """The newest ones, newest first."""
        return list(islice(reversed(self._records), count))

    def of(self, request_id: str) -> Record:
        """The last decision for a request. Raises ``NotFoundError``."""
        for record in reversed(self._records):
            if record.request_id == request_id:
                return record
        raise NotFoundError(
            f"request {request_id!r} is not among the last {self._records.maxlen} decisions of this router",
            param="request_id",
        )


def explain(record: Record) -> admin_pb2.Explanation:
    """A decision in words and figures."""
    explanation = admin_pb2.Explanation(
        request_id=record.request_id,
        decided_at_s=round(record.decided_at_s, 3),
        policy=record.policy,
        reason=_reason(record),
        prompt_tokens=record.num_tokens,
        full_blocks=record.num_blocks,
        block_size=record.block_size,
        retries=record.num_retries,
        queue_s=round(record.queue_s, 6),
    )
    if record.cached_tokens is not None:
        explanation.cached_tokens = record.cached_tokens
    if record.ttft_s is not None:
        explanation.ttft_s = round(record.ttft_s, 6)
    if record.cache is not None:
        explanation.cache.CopyFrom(record.cache)
    decision = record.decision
    if decision is not None:
        explanation.chosen = decision.chosen.replica
        explanation.replicas.extend(_candidates(record, decision))
        if record.would_wait:
            explanation.replicas[0].detail = "full: the request would wait in the router's queue"
    seen = {one.replica for one in explanation.replicas}
    others = {name: Absence("READY", "not_sampled") for name in record.eligible if name not in seen}
    others |= {**record.absent, **record.passed_over}
    most = (record.num_tokens - 1) // record.block_size  # the last token is computed in any case
    for name in sorted(others):
        state, reason, detail = others[name]
        held = record.held.get(name, _NOTHING)
        device, total = (min(count, most) for count in held)
        explanation.replicas.add(
            replica=name,
            state=state,
            reason=reason,
            detail=detail,
            device_blocks=device,
            host_blocks=total - device,
            matched_tokens=total * record.block_size,
        )
    return explanation


def as_json(message: Message) -> dict[str, Any]:
    """A message as the object that HTTP answers with."""
    found: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def as_metadata(explanation: admin_pb2.Explanation) -> str:
    """The same as one line of ASCII, with no more replicas than trailing metadata can carry."""
    while True:
        line = json.dumps(as_json(explanation), separators=(",", ":"))
        surplus = len(line) - _MAX_METADATA_BYTES
        replicas = explanation.replicas
        if surplus <= 0 or len(replicas) <= 1:
            return line
        num_kept = max(1, len(replicas) * _MAX_METADATA_BYTES // len(line))
        num_kept = min(num_kept, len(replicas) - 1)
        explanation.left_out += len(replicas) - num_kept
        del replicas[num_kept:]


def _reason(record: Record) -> str:
    decision = record.decision
    if decision is None:
        return "no_replica"
    if record.num_tokens <= record.block_size:  # the last token is computed in any case
        return "below_block"
    if not record.num_blocks:
        return "no_reuse"
    if not decision.best_matched_tokens:
        return "cold"
    return "cheaper" if decision.regret_tokens else "warmest"


def _candidates(record: Record, decision: Decision) -> list[admin_pb2.ReplicaExplanation]:
    """The chosen one first, then the others by what they would have cost."""
    candidates = decision.candidates
    costs = decision.costs or marginal_costs(record.num_tokens, candidates)
    scores = decision.scores or [0.0] * len(candidates)
    best = min(scores)
    found = []
    for candidate, cost, score in zip(candidates, costs, scores, strict=True):
        if candidate is decision.chosen:
            reason, rank = "chosen", -1
        elif not decision.scores:
            reason, rank = "not_preferred", 1
        elif score > best:
            reason, rank = "more_expensive" if decision.costs else "not_preferred", 1
        else:
            reason, rank = "below_block" if record.num_tokens <= record.block_size else "tied", 0
        found.append((rank, score, _candidate(candidate, cost, reason, record)))
    found.sort(key=lambda one: (*one[:2], one[2].replica))
    return [one[2] for one in found]


def _candidate(candidate: Candidate, cost: Cost, reason: str, record: Record) -> admin_pb2.ReplicaExplanation:
    block_size = record.block_size
    fixed_s = (candidate.waiting_requests + 1) * record.overhead_s
    reported = candidate.matched_tokens - candidate.pending_tokens
    return admin_pb2.ReplicaExplanation(
        replica=candidate.replica,
        state="READY",
        reason=reason,
        device_blocks=(reported - candidate.host_tokens) // block_size,
        host_blocks=candidate.host_tokens // block_size,
        pending_blocks=candidate.pending_tokens // block_size,
        matched_tokens=candidate.matched_tokens,
        waiting_tokens=candidate.waiting_tokens,
        waiting_requests=candidate.waiting_requests,
        in_flight=candidate.in_flight,
        predicted_ttft_s=round(fixed_s + cost.wait_s + cost.miss_s, 6),
        wait_s=round(cost.wait_s, 6),
        miss_s=round(cost.miss_s, 6),
        delayed_s=round(cost.delayed_s, 6),
        displaced_s=round(cost.displaced_s, 6),
        cost_s=round(cost.total_s, 6),
    )
