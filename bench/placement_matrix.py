"""Placement rules over many loads, in virtual time: mean TTFT of each beside the best of its cell.

    python -P bench/placement_matrix.py [--full] [--rules a,b] [--cells tenants] [--mooncake TRACE] [--jobs 2] [--live]

A cell is a load, a number of replicas, a cache size and a way to send: a closed loop with 4 requests in flight per
replica, or an open one at a share of what the fleet sustains. Rules are the router's policies and, for comparison
alone, five others with the same knowledge: `wait+3miss`; llm-d's scorers (prefix 3, queue 2, KV use 2; llm-d-router,
default profile) with pending entries; the default's terms without the answers, with weights of 1 and of 2 for what is
displaced (`1+L`), and those without eviction (`b=0`); and (1.5 + 0.5 L) with b = 3. Each runs with 3 seeds (--full: 5,
and all cells): of the load, where it is made here, and of what a rule draws by lot. The default draws nothing in fleets
of up to 32 replicas, since every request here names its session.
Prints one JSON line per cell and rule, then one per rule with geometric means of the ratios to the best rule of each
cell. Cells of the Mooncake trace need that file.

Lines with ``goal`` say what was wished for, what came of it and whether that is enough (``goal_met``): of the default
over all cells; at the frontier of hits and balance (tenants, 8 replicas, 40 %, 32 in flight); there with three routers
beside one; and with --live there over the wire beside the virtual clock (15 minutes, and two cores for itself), of
which it is the mean of several runs: where a single one goes is chance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import runpy
import statistics
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cache.block_hash import HashScheme
from router.policy import POLICIES, Ask, Candidate, Cost, Decision, Policy, marginal_costs
from warmfront.replay.live import run_live
from warmfront.replay.settings import Settings
from warmfront.replay.simulation import Outcome, open_loop_speed, oracle_hit_rate, simulate
from warmfront.replay.trace import Job, Turn, name_blocks, read_trace

# bench/ is no package and not on the path: cache.py in it would hide ours.
tenants_load = runpy.run_path(str(Path(__file__).parent / "traces" / "tenants.py"))["tenants_load"]

DECODE_S = 1e-4
FIRST_SEED = 8
LIVE_TIME_SCALE = 100.0
NUDGES, NUDGE = 12, 0.006
Score = Callable[[Ask, Candidate, Cost], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    load: str  # tenants, conversation, hot, unique, burst
    replicas: int
    cache_percent: int  # of the distinct blocks, over all replicas
    open_share: float | None = None  # None: closed loop
    times: int = 1  # of the tenants load: so many of it side by side
    in_flight: int | None = None
    routers: int = 1

    @property
    def name(self) -> str:
        sending = f"open {self.open_share:.0%}" if self.open_share else f"closed {self.in_flight or 4 * self.replicas}"
        times = f" x{self.times}" if self.times > 1 else ""
        routers = f", {self.routers} routers" if self.routers > 1 else ""
        return f"{self.load}{times}, {self.replicas} replicas, {self.cache_percent} %, {sending}{routers}"


FRONTIER = Cell(load="tenants", replicas=8, cache_percent=40)  # hits against balance, and the goals below
SEVERAL_ROUTERS = replace(FRONTIER, routers=3)


def default_cells() -> list[Cell]:
    return [
        *(Cell(load="tenants", replicas=8, cache_percent=percent) for percent in (20, 40, 80)),
        *(Cell(load="tenants", replicas=8, cache_percent=40, open_share=share) for share in (0.8, 0.95)),
        Cell(load="tenants", replicas=32, cache_percent=40, times=4),
        Cell(load="conversation", replicas=8, cache_percent=40),
        Cell(load="conversation", replicas=32, cache_percent=40, open_share=0.95),
        Cell(load="conversation", replicas=128, cache_percent=40, in_flight=32),
        Cell(load="hot", replicas=8, cache_percent=40),
        Cell(load="hot", replicas=8, cache_percent=40, open_share=0.95),
        Cell(load="unique", replicas=8, cache_percent=40, open_share=0.95),
        Cell(load="burst", replicas=8, cache_percent=40, open_share=0.5),
    ]


def full_cells() -> list[Cell]:
    loads = [("tenants", 8, 1), ("tenants", 32, 4)]
    loads += [("conversation", replicas, 1) for replicas in (8, 32, 128)]
    loads += [(load, replicas, 1) for load in ("hot", "unique", "burst") for replicas in (8, 32)]
    return [
        *(
            Cell(load=load, replicas=replicas, times=times, cache_percent=percent, open_share=share)
            for load, replicas, times in loads
            for percent in (20, 40, 80)
            for share in (None, 0.5, 0.8, 0.95)
        ),
        Cell(load="conversation", replicas=128, cache_percent=40, in_flight=32),
    ]


# Loads


def _turns(cell: Cell, seed: int, mooncake: Path | None) -> list[Turn]:
    if cell.load == "conversation":
        assert mooncake is not None
        return read_trace(mooncake)
    if cell.load == "tenants":
        turns = [turn for part in range(cell.times) for turn in _tenants(seed + 100 * part, f"{part} ")]
    else:
        turns = list({"hot": _hot, "unique": _unique, "burst": _burst}[cell.load](random.Random(seed)))
    return sorted(turns, key=lambda turn: turn.at_s)


def _tenants(seed: int, prefix: str) -> list[Turn]:
    return [
        Turn(
            at_s=line["timestamp_ms"] / 1000,
            session=prefix + line["session"],
            num_tokens=len(line["token_ids"]),
            num_output_tokens=line["output_tokens"],
            token_ids=array("i", line["token_ids"]),
            output_token_ids=array("i", line["output_token_ids"]),
        )
        for line in tenants_load(seed)
    ]


def _hot(rng: random.Random) -> Iterator[Turn]:
    """60 % of the requests begin with one prefix of 4,000 tokens, the others with one of 60 of 2,000."""
    hot, others = _tokens(rng, 4000), [_tokens(rng, 2000) for _ in range(60)]
    at_s = 0.0
    for number in range(2000):
        at_s += rng.expovariate(9.0)
        front = hot if rng.random() < 0.6 else rng.choice(others)
        yield _turn(at_s, number, front + _tokens(rng, rng.randrange(100, 800)))


def _unique(rng: random.Random) -> Iterator[Turn]:
    at_s = 0.0
    for number in range(2000):
        at_s += rng.expovariate(9.0)
        yield _turn(at_s, number, _tokens(rng, rng.randrange(500, 4000)))


def _burst(rng: random.Random) -> Iterator[Turn]:
    """Every 40 s, 48 requests within half a second share a cold prefix; between them the tenants load goes on."""
    background = _tenants(rng.randrange(1000), "")
    yield from background
    number = 0
    for start_s in range(20, int(background[-1].at_s), 40):
        front = _tokens(rng, 3000)
        for _ in range(48):
            number += 1
            yield _turn(start_s + rng.random() / 2, -number, front + _tokens(rng, rng.randrange(50, 300)))


def _tokens(rng: random.Random, count: int) -> array[int]:
    return array("i", [rng.randrange(1000, 32000) for _ in range(count)])


def _turn(at_s: float, number: int, token_ids: array[int]) -> Turn:
    return Turn(at_s=at_s, session=f"u{number}", num_tokens=len(token_ids), num_output_tokens=100, token_ids=token_ids)


# Rules of this benchmark alone


def _by_cost(score: Score) -> Policy:
    def rule(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
        costs = marginal_costs(ask.num_tokens, candidates)
        scores = [score(ask, candidate, cost) for candidate, cost in zip(candidates, costs, strict=True)]
        best = min(scores)
        tied = [candidate for candidate, one in zip(candidates, scores, strict=True) if one == best]
        fewest = min(candidate.in_flight for candidate in tied)
        chosen = rng.choice([candidate for candidate in tied if candidate.in_flight == fewest])
        return Decision(chosen, "", [], max(candidate.matched_tokens for candidate in candidates))

    return rule


def _marginal(base: float, per_waiting: float, displacement: float) -> Policy:
    return _by_cost(
        lambda ask, candidate, cost: (
            cost.wait_s
            + (base + per_waiting * candidate.waiting_requests) * cost.miss_s
            + displacement * cost.displaced_s
        )
    )


def _llm_d(ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    """3 x share of the prompt matched + 2 x shortness of the queue + 2 x share of the KV cache not in use."""
    longest = max(candidate.waiting_requests for candidate in candidates)
    shortest = min(candidate.waiting_requests for candidate in candidates)

    def score(ask: Ask, candidate: Candidate, cost: Cost) -> float:
        queue = (longest - candidate.waiting_requests) / (longest - shortest) if longest > shortest else 1.0
        in_use = min(1.0, candidate.in_flight / 64)
        return -(3 * candidate.matched_tokens / ask.num_tokens + 2 * queue + 2 * (1 - in_use))

    return _by_cost(score)(ask, candidates, rng)


REFERENCES: dict[str, Policy] = {
    "wait+3miss": _marginal(3, 0, 0),
    "llm-d 3:2:2": _llm_d,
    "1+L": _marginal(1, 1, 2),
    "b=0": _marginal(1, 1, 0),
    "(1.5+0.5L) b=3": _marginal(1.5, 0.5, 3),
}
RULES: dict[str, Policy] = {**POLICIES, **REFERENCES}


# Running


@dataclass(frozen=True, slots=True)
class Prepared:
    """What every rule of a cell shares under one seed of the load: named requests, the fleet, the oracle."""

    jobs: list[Job]
    scheme: HashScheme
    settings: Settings
    oracle_hit_rate: float


def prepare(cell: Cell, seed: int, mooncake: Path | None) -> Prepared:
    scheme = HashScheme(block_size=512 if cell.load == "conversation" else 16)
    jobs = name_blocks(_turns(cell, seed, mooncake), scheme)
    longest = max(-(-(job.turn.num_tokens + job.turn.num_output_tokens) // scheme.block_size) for job in jobs)
    num_distinct = len(set().union(*(job.all_hashes for job in jobs)))
    settings = Settings(
        num_replicas=cell.replicas,
        kv_blocks=max(longest, num_distinct * cell.cache_percent // (100 * cell.replicas)),
        decode_s=DECODE_S,
        max_num_batched_tokens=2048 if cell.load == "conversation" else 512,  # its prompts have 12,000 tokens
        in_flight=cell.in_flight,
        num_routers=cell.routers,
    )
    if cell.open_share is not None:
        settings = replace(settings, speed=open_loop_speed(jobs, scheme, settings, cell.open_share))
    return Prepared(jobs, scheme, settings, oracle_hit_rate(jobs, scheme, cell.replicas * settings.kv_blocks))


def run_cell(cell: Cell, rules: Sequence[str], num_seeds: int, mooncake: Path | None) -> list[dict[str, Any]]:
    """A row per rule. A seed is one of the load, where it is made here, and of what a rule draws by lot."""
    runs: dict[str, list[tuple[Outcome, float]]] = {rule: [] for rule in rules}
    prepared = None
    for seed in range(num_seeds):
        if prepared is None or cell.load != "conversation":
            prepared = prepare(cell, FIRST_SEED + seed, mooncake)
        for rule in rules:
            settings = replace(prepared.settings, policy=rule, seed=seed)
            outcome = simulate(prepared.jobs, prepared.scheme, settings, rules=RULES)
            outcome.final_caches.clear()
            runs[rule].append((outcome, prepared.oracle_hit_rate))
    rows = [{"cell": cell.name, "rule": rule, **_figures(runs[rule])} for rule in rules]
    for figure in ("ttft_ms", "p95_ms", "makespan_s"):
        best = min(row[figure] for row in rows)
        for row in rows:
            row[f"{figure}_ratio"] = round(row[figure] / best, 4)
    return rows


def _figures(runs: Sequence[tuple[Outcome, float]]) -> dict[str, Any]:
    def mean(figure: Callable[[Outcome], float]) -> float:
        return round(sum(figure(outcome) for outcome, _ in runs) / len(runs), 5)

    of_oracle = [outcome.hit_rate / oracle if oracle else 1.0 for outcome, oracle in runs]
    return {
        "ttft_ms": mean(lambda one: 1000 * one.mean_ttft_s),
        "p50_ms": mean(lambda one: 1000 * one.ttft_quantile_s(0.5)),
        "p95_ms": mean(lambda one: 1000 * one.ttft_quantile_s(0.95)),
        "makespan_s": mean(lambda one: one.makespan_s),
        "hit_of_oracle": round(sum(of_oracle) / len(of_oracle), 5),
        "prefill_imbalance": mean(lambda one: one.prefill_imbalance),
    }


def summary(rows: Sequence[dict[str, Any]], rules: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Per rule the geometric means over the cells."""
    for rule in rules:
        mine = [row for row in rows if row["rule"] == rule]
        ratios = [figure for figure in mine[0] if figure.endswith("_ratio")]
        yield {
            "rule": rule,
            **{figure: round(_geometric_mean([row[figure] for row in mine]), 4) for figure in ratios},
            "worst_ttft_ratio": max(row["ttft_ms_ratio"] for row in mine),
            "hit_of_oracle": round(sum(row["hit_of_oracle"] for row in mine) / len(mine), 4),
            "prefill_imbalance": round(sum(row["prefill_imbalance"] for row in mine) / len(mine), 4),
        }


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# Goals


def _goal(name: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> dict[str, Any]:
    bound = {"at_most": at_most} if at_most is not None else {"at_least": at_least}
    is_met = value <= at_most if at_most is not None else at_least is not None and value >= at_least
    return {"goal": name, "value": round(value, 4), **bound, "goal_met": is_met}


def matrix_goals(line: dict[str, Any], num_cells: int) -> Iterator[dict[str, Any]]:
    """Of the default's line of the summary, which compares it with every other rule that ran."""
    where = f"mean TTFT beside the best rule's, {num_cells} cells"
    yield _goal(f"{where}: geometric mean", line["ttft_ms_ratio"], at_most=1.05)
    yield _goal(f"{where}: the worst", line["worst_ttft_ratio"], at_most=1.4)


def frontier_goals(rows: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of the rows of the frontier's cell, by rule: as many of the goals as there are rules for."""
    for rule, least_hits, most_imbalance in (("warmfront", 0.96, 1.1), ("warmfront_sticky", 0.98, 1.15)):
        if rule in rows:
            where = f"frontier, {rule}"
            yield _goal(f"{where}: hits of the oracle's", rows[rule]["hit_of_oracle"], at_least=least_hits)
            yield _goal(f"{where}: prefill imbalance", rows[rule]["prefill_imbalance"], at_most=most_imbalance)
    if {"warmfront", "longest_prefix"} <= rows.keys():
        ours, theirs = rows["warmfront"], rows["longest_prefix"]
        for figure, what, most in (("p95_ms", "p95 of TTFT", 0.85), ("makespan_s", "makespan", 0.9)):
            name = f"frontier, warmfront beside longest_prefix: {what}"
            yield _goal(name, ours[figure] / theirs[figure], at_most=most)


def routers_goals(one: dict[str, Any], several: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of the default's rows with one router and with several that clients take in turn."""
    where = f"{SEVERAL_ROUTERS.routers} routers beside one"
    yield _goal(f"{where}: mean TTFT", several["ttft_ms"] / one["ttft_ms"], at_most=1.1)
    yield _goal(f"{where}: hits", several["hit_of_oracle"] / one["hit_of_oracle"], at_least=0.98)


def live_row(seed: int) -> dict[str, Any]:
    """Figures of one load over the wire."""
    prepared = prepare(FRONTIER, seed, None)
    turns = [job.turn for job in prepared.jobs]
    live = run_live(turns, prepared.scheme.block_size, prepared.settings, LIVE_TIME_SCALE)
    return {"live": FRONTIER.name, "seed": seed, **_figures([(live, prepared.oracle_hit_rate)])}


def virtual_rows(seed: int) -> list[dict[str, Any]]:
    """Figures of the same load under the virtual clock, in runs that differ in speed by less than anybody could tell.

    That is enough for other decisions, and those for others again: where each run goes in the end is as much chance as
    where one over the wire goes, and only their mean says what to expect of it.
    """
    prepared = prepare(FRONTIER, seed, None)
    rows = []
    for number in range(NUDGES):
        speed = prepared.settings.prefill_tokens_per_s * (1 + NUDGE * (number / (NUDGES - 1) - 0.5))
        outcome = simulate(prepared.jobs, prepared.scheme, replace(prepared.settings, prefill_tokens_per_s=speed))
        outcome.final_caches.clear()
        rows.append({"virtual": FRONTIER.name, "seed": seed, **_figures([(outcome, prepared.oracle_hit_rate)])})
    return rows


def live_goals(live: Sequence[dict[str, Any]], virtual: Sequence[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Of one run per load over the wire beside the mean of those under the virtual clock."""
    for figure, name in (("p50_ms", "p50 of TTFT"), ("p95_ms", "p95 of TTFT")):
        means = [statistics.mean(row[figure] for row in rows) for rows in virtual]
        spread = statistics.mean(
            statistics.stdev(row[figure] for row in rows) / mean for rows, mean in zip(virtual, means, strict=True)
        )
        ratio = statistics.mean(row[figure] / mean for row, mean in zip(live, means, strict=True))
        where = f"live beside virtual, {len(live)} loads: {name}, how far off"
        yield {**_goal(where, abs(ratio - 1), at_most=0.05), "deviation_of_one_run": round(spread, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Placement rules over many loads, in virtual time.")
    parser.add_argument("--full", action="store_true", help="all cells, 5 seeds")
    parser.add_argument("--rules", help=f"of {', '.join(RULES)}")
    parser.add_argument("--cells", default="", help="only cells whose name contains this")
    parser.add_argument("--mooncake", type=Path, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--live", action="store_true", help="the frontier's cell over the wire too")
    options = parser.parse_args()
    rules = options.rules.split(",") if options.rules else list(RULES)
    if unknown := set(rules) - set(RULES):
        parser.error(f"--rules: there is no {', '.join(sorted(unknown))}: use some of {', '.join(RULES)}")
    all_cells = full_cells() if options.full else default_cells()
    cells = [cell for cell in all_cells if options.cells in cell.name]
    if options.mooncake is None:
        print("no --mooncake trace: cells of the conversation trace are left out", file=sys.stderr)
        cells = [cell for cell in cells if cell.load != "conversation"]
    if not cells:
        parser.error(f"--cells: no name contains {options.cells!r}: {'; '.join(cell.name for cell in all_cells)}")
    num_seeds = 5 if options.full else 3
    has_frontier = FRONTIER in cells and "warmfront" in rules
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(run_cell, cell, rules, num_seeds, options.mooncake) for cell in cells]
        if has_frontier:
            several = pool.submit(run_cell, SEVERAL_ROUTERS, ["warmfront"], num_seeds, None)
        for run in runs:
            for row in run.result():
                rows.append(row)
                say(row)
        summaries = list(summary(rows, rules))
        for line in summaries:
            say(line)
        for line in summaries:
            if line["rule"] == "warmfront" and len(rules) > 1:
                say(*matrix_goals(line, len(cells)))
        if has_frontier:
            frontier = {row["rule"]: row for row in rows if row["cell"] == FRONTIER.name}
            say(*frontier_goals(frontier))
            (row,) = several.result()
            say(row, *routers_goals(frontier["warmfront"], row))
    if has_frontier and options.live:
        seeds = range(FIRST_SEED, FIRST_SEED + num_seeds)
        with ProcessPoolExecutor(options.jobs) as pool:
            virtual = list(pool.map(virtual_rows, seeds))
        with ProcessPoolExecutor(num_seeds) as pool:  # all at once: simulated times are long beside what they cost here
            live = list(pool.map(live_row, seeds))
        say(*live, *live_goals(live, virtual))


def say(*lines: dict[str, Any]) -> None:
    for line in lines:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
