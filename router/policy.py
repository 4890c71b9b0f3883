"""Which replica gets a request: plain functions over plain data.

The default is the least marginal cost in seconds. A replica's cost is what waits there, my prefill there counted for
me, for those to come and for each request it delays, and what my blocks push out of its cache::

    cost(r) = wait(r) + (1.25 + L(r) + 0.3 * answers(r)) * miss(r) + 2.5 * displaced(r)

    miss(r)       prompt tokens not matched / speed(r), and those in host memory alone / how fast they come back
    wait(r)       tokens charged to requests without a first token / speed(r), less the time since r's last progress
    L(r)          requests without a first token
    answers(r)    answers that grow there: my prompt, computed beside them, holds each up. A later end is worth less
                  than a later first token
    displaced(r)  tokens r must lose for the missing ones / speed(r) * min(4, mean age / age(r))

An idle replica takes a copy cheaply, so bursts and hot prefixes spread; a busy one is given no repeat work, so nothing
replicates under load. No threshold of load or of heat decides; the one band is for noise: idle replicas within 1.5
times of the fastest count as equally fast. The other policies are for comparison and for taste. docs/replay.md has the
figures.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# Of my own prefill. More keeps requests where their front lies, for the good of those to come; less evens the work out.
OWN_WEIGHT = 1.25
DISPLACEMENT_WEIGHT = 2.5
ANSWER_WEIGHT = 0.3  # more makes the work more even and first tokens later
_MAX_AGE_RATIO = 4.0
# Of a replica that does not say how fast blocks come back from host memory: a tenth of computing them. That is KV of a
# 7-8B model (0.13 MB a token with grouped heads) over a link of 25 GB/s against prefill of 10 to 20 thousand tokens/s.
USUAL_HOST_TOKEN_COST = 0.1
_SPEED_NOISE = 1.5  # learned speeds of equal replicas differ by less
_LOAD_BOUND = 1.25  # consistent_hash: no replica above this times the mean of requests in flight
_LOAD_FLOOR = 2  # and the bound is never below this many; also how many more a hint's home may have in flight


@dataclass(slots=True)
class Candidate:
    """One eligible replica at the moment of the decision."""

    replica: str
    matched_tokens: int = 0  # whole blocks held there, sure to come ones (pending) included
    pending_tokens: int = 0  # the part of matched_tokens that the replica has not reported yet
    host_tokens: int = 0  # the part of matched_tokens that lies in host memory alone
    host_token_cost: float = USUAL_HOST_TOKEN_COST  # of one of these, in tokens computed
    waiting_tokens: float = 0.0  # charged to requests there without a first token
    waiting_requests: int = 0  # L
    in_flight: int = 0
    since_progress_s: float = 0.0  # since its last first token, or since it became busy
    speed: float = 1.0  # prompt tokens per second
    free_tokens: int = 1 << 60  # room in its cache, host memory included, that displaces nothing
    lru_age_s: float = 0.0  # idle time of its next victim; 0: it has free blocks

    def work_tokens(self, num_tokens: int) -> int:
        """What a prompt of ``num_tokens`` costs here, in tokens computed."""
        missing = num_tokens - self.matched_tokens
        return missing + int(self.host_token_cost * self.host_tokens) if self.host_tokens else missing


@dataclass(slots=True)
class Cost:
    """A candidate's cost in seconds, by term."""

    replica: str
    matched_tokens: int
    pending_tokens: int
    wait_s: float
    miss_s: float
    delayed_s: float  # of other requests: those waiting, and the answers by their weight
    displaced_s: float
    before_answers_s: float  # the total without the answers: what differs in no more counts as equal to a hint
    total_s: float


@dataclass(slots=True)
class Decision:
    """The choice and why. ``costs`` is empty for policies that do not reckon in seconds."""

    chosen: Candidate
    policy: str
    costs: list[Cost]
    best_matched_tokens: int  # of the eligible replica that holds most
    scores: list[float] = field(default_factory=list)  # per candidate, the lowest wins; empty: the policy has none
    candidates: Sequence[Candidate] = ()

    @property
    def regret_tokens(self) -> int:
        """Tokens the best holder held more than the chosen one."""
        return self.best_matched_tokens - self.chosen.matched_tokens


@dataclass(slots=True)
class Ask:
    """What a policy may know of the request."""

    num_tokens: int
    affinity: str = ""  # session, or the front of the prompt: equal values like one replica
    has_session: bool = False
    turn: int = 0  # decisions taken before this one


Policy = Callable[[Ask, Sequence[Candidate], random.Random], Decision]


def choose(
    policy: str,
    ask: Ask,
    candidates: Sequence[Candidate],
    rng: random.Random,
    rules: Mapping[str, Policy] | None = None,
) -> Decision:
    """The decision of the named policy. ``candidates`` is not empty; ``rng`` breaks ties.

    ``rules`` are the policies to choose from where they are not ``POLICIES``: a benchmark brings its own.
    """
    decision = (rules or POLICIES)[policy](ask, candidates, rng)
    decision.policy = policy
    decision.candidates = candidates
    return decision


def marginal_costs(
    num_tokens: int,
    candidates: Sequence[Candidate],
    *,
    own_weight: float = OWN_WEIGHT,
    answer_weight: float = ANSWER_WEIGHT,
    displacement_weight: float = DISPLACEMENT_WEIGHT,
) -> list[Cost]:
    """What each candidate would cost, in their order. ``own_weight``: how often my prefill counts for myself."""
    ages = [c.lru_age_s for c in candidates if c.lru_age_s > 0]
    mean_age = sum(ages) / len(ages) if ages else 0.0
    # Idle replicas of about one speed count as equally fast: what was learned last must not send all of a light load
    # to one of them.
    fastest_idle = max([c.speed for c in candidates if not c.waiting_requests], default=0.0)
    costs = []
    for c in candidates:
        speed, waiting_requests, matched_tokens = c.speed, c.waiting_requests, c.matched_tokens
        if not waiting_requests and speed * _SPEED_NOISE >= fastest_idle:
            speed = fastest_idle
        new_tokens = num_tokens - matched_tokens  # what comes back from host memory leaves a place there
        miss_s = (c.work_tokens(num_tokens) if c.host_tokens else new_tokens) / speed
        wait_s = c.waiting_tokens / speed - c.since_progress_s if c.waiting_tokens else 0.0
        if wait_s < 0.0:
            wait_s = 0.0
        before_answers_s = wait_s + (own_weight + waiting_requests) * miss_s
        displaced_s = 0.0
        if new_tokens > c.free_tokens:
            ratio = mean_age / c.lru_age_s if c.lru_age_s > 0 else 1.0
            displaced_s = (new_tokens - c.free_tokens) / speed * min(_MAX_AGE_RATIO, ratio)
            before_answers_s += displacement_weight * displaced_s
        num_answers = c.in_flight - waiting_requests
        answers_s = answer_weight * num_answers * miss_s if num_answers > 0 else 0.0
        costs.append(
            Cost(
                c.replica,
                matched_tokens,
                c.pending_tokens,
                wait_s,
                miss_s,
                waiting_requests * miss_s + answers_s,
                displaced_s,
                before_answers_s,
                before_answers_s + answers_s,
            )
        )
    return costs


def _warmfront(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    return _cheapest(ask, candidates, rng, marginal_costs(ask.num_tokens, candidates))


def _warmfront_sticky(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    """The default with more regard for what lies warm: about 1 % more hits, more waiting under an open load."""
    costs = marginal_costs(ask.num_tokens, candidates, own_weight=1.75, displacement_weight=3.5)
    return _cheapest(ask, candidates, rng, costs)


def _cheapest(ask: Ask, candidates: Sequence[Candidate], rng: random.Random, costs: list[Cost]) -> Decision:
    """The lowest cost. A hint says who of equally cheap ones it is: equal hints have one home while load allows it."""
    scores = [cost.total_s for cost in costs]
    if ask.has_session:
        before_answers_s = costs[scores.index(min(scores))].before_answers_s
        tied = [c for c, cost in zip(candidates, costs, strict=True) if cost.before_answers_s == before_answers_s]
        if len(tied) > 1:
            fewest = min(c.in_flight for c in tied)
            tied = [c for c in tied if c.in_flight <= fewest + _LOAD_FLOOR]
            return _take(candidates, _rendezvous(ask.affinity, tied)[0], costs, scores)
    return _decide(candidates, scores, rng, costs)


def _predicted_ttft(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    costs = marginal_costs(ask.num_tokens, candidates)
    return _decide(candidates, [cost.wait_s + cost.miss_s for cost in costs], rng, costs)


def _longest_prefix(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    """Of reported blocks alone: with the pending ones, and no term for load, one replica would draw everything."""
    scores = [c.pending_tokens - c.matched_tokens + c.host_token_cost * c.host_tokens for c in candidates]
    return _decide(candidates, scores, rng)


def _least_load(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    return _decide(candidates, [c.waiting_tokens / c.speed for c in candidates], rng)


def _random(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    return _take(candidates, rng.choice(candidates))


def _round_robin(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    by_name = sorted(candidates, key=lambda c: c.replica)
    return _take(candidates, by_name[ask.turn % len(by_name)])


def _consistent_hash(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    """Rendezvous hashing of the front; a replica at its bound passes the request on to the next in its order."""
    if not ask.affinity:
        return _least_load(ask, candidates, rng)
    total = sum(c.in_flight for c in candidates) + 1
    bound = max(_LOAD_FLOOR, -(-int(total * _LOAD_BOUND * 100) // (100 * len(candidates))))
    ranked = _rendezvous(ask.affinity, candidates)
    return _take(candidates, next((c for c in ranked if c.in_flight < bound), None) or _fewest_in_flight(ranked))


def _session(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    if not ask.has_session:
        return _least_load(ask, candidates, rng)
    return _take(candidates, _rendezvous(ask.affinity, candidates)[0])


POLICIES: dict[str, Policy] = {
    "warmfront": _warmfront,
    "warmfront_sticky": _warmfront_sticky,
    "longest_prefix": _longest_prefix,
    "predicted_ttft": _predicted_ttft,
    "least_load": _least_load,
    "round_robin": _round_robin,
    "random": _random,
    "consistent_hash": _consistent_hash,
    "session": _session,
}


def _decide(
    candidates: Sequence[Candidate], scores: list[float], rng: random.Random, costs: list[Cost] | None = None
) -> Decision:
    """The lowest score; ties go to the fewest in flight, then by lot."""
    best = min(scores)
    tied = [c for c, score in zip(candidates, scores, strict=True) if score == best]
    if len(tied) > 1:
        fewest = min([c.in_flight for c in tied])
        tied = [c for c in tied if c.in_flight == fewest]
    return _take(candidates, tied[0] if len(tied) == 1 else rng.choice(tied), costs, scores)


def _take(
    candidates: Sequence[Candidate],
    chosen: Candidate,
    costs: list[Cost] | None = None,
    scores: list[float] | None = None,
) -> Decision:
    return Decision(chosen, "", costs or [], max([c.matched_tokens for c in candidates]), scores or [])


def _fewest_in_flight(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: c.in_flight)


def _rendezvous(affinity: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates by a hash of the affinity and each name: one that joins or leaves moves only its own share."""

    def weight(candidate: Candidate) -> bytes:
        return hashlib.blake2b(f"{affinity}\0{candidate.replica}".encode(), digest_size=8).digest()

    return sorted(candidates, key=weight)
