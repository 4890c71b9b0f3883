"""What a replay found: one object per policy, tables for people, plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from router.flow import bound_of
from warmfront.console import in_columns
from warmfront.errors import WrongUse
from warmfront.replay.simulation import Outcome

_NUM_WINDOWS = 40  # of the plot of hit rate over time


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a policy's hit rate lies between: one cache of the summed size, and placement by lot."""

    oracle_hit_rate: float
    random_hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a block size costs. ``sub_block_loss`` is None for a trace without token ids."""

    block_size: int
    sub_block_loss: float | None  # share of the prompt tokens that a cache of single tokens would hit besides
    hash_ms: float  # to name the blocks of a mean prompt
    index_bytes: int  # of one router's index, when all caches are as the run left them


def as_object(outcome: Outcome, bounds: Bounds, costs: Costs | None = None) -> dict[str, Any]:
    """One policy's line of ``--json``; with ``costs`` also what was asked and what it takes."""
    result: dict[str, Any] = {
        "policy": outcome.settings.policy,
        "hit_rate": round(outcome.hit_rate, 5),
        "oracle_hit_rate": round(bounds.oracle_hit_rate, 5),
        "random_hit_rate": round(bounds.random_hit_rate, 5),
        "ttft_ms": {f"p{percent}": _milliseconds(outcome, percent) for percent in (50, 95, 99)},
        "imbalance": {
            "requests": round(outcome.request_imbalance, 4),
            "prefill": round(outcome.prefill_imbalance, 4),
        },
        "makespan_s": round(outcome.makespan_s, 4),
        "regret_tokens": outcome.regret_tokens,
    }
    if costs is not None:
        result |= {
            "replicas": outcome.settings.num_replicas,
            "kv_blocks": outcome.settings.kv_blocks,
            "block_size": costs.block_size,
            "sub_block_loss": None if costs.sub_block_loss is None else round(costs.sub_block_loss, 5),
            "hash_ms": round(costs.hash_ms, 3),
            "index_bytes": costs.index_bytes,
        }
    return result


def as_line(result: dict[str, Any]) -> str:
    """An object on one line."""
    return json.dumps(result, separators=(", ", ": "))


def over_bound_note(outcome: Outcome) -> str:
    """What this run cannot show: requests went where a router would have sent no more. Empty where none did."""
    settings = outcome.settings
    if not outcome.num_over_bound:
        return ""
    bound = bound_of(settings, settings.prefill_tokens_per_s)
    return (
        f"{settings.policy}, {settings.num_replicas} replicas: {outcome.num_over_bound:,} of {len(outcome.ttft_s):,} "
        f"requests went to a replica that was full ({bound.requests} requests, or {bound.tokens:,} tokens to compute). "
        "A router would have held them back until one had room; the virtual clock has no such queue"
    )


def policy_table(results: Sequence[dict[str, Any]]) -> str:
    """Policies side by side."""
    head = ["policy", "hit rate", "of oracle", "TTFT p50", "p95", "p99 ms", "requests", "prefill", "makespan", "regret"]
    rows = [
        [
            one["policy"],
            f"{one['hit_rate']:.1%}",
            _share(one["hit_rate"], one["oracle_hit_rate"]),
            *(f"{one['ttft_ms'][name]:.1f}" for name in ("p50", "p95", "p99")),
            *(f"{one['imbalance'][name]:.2f}" for name in ("requests", "prefill")),
            f"{one['makespan_s']:.2f} s",
            f"{one['regret_tokens']:,}",
        ]
        for one in results
    ]
    return in_columns(head, rows, left=("policy",))


def capacity_table(results: Sequence[dict[str, Any]]) -> str:
    """What more replicas, more blocks or other blocks would bring."""
    head = ["policy", "replicas", "kv-blocks", "block-size", "hit rate", "of oracle", "TTFT p50", "p95 ms"]
    head += ["sub-block loss", "hash ms", "index MiB"]
    rows = [
        [
            one["policy"],
            f"{one['replicas']}",
            f"{one['kv_blocks']:,}",
            f"{one['block_size']}",
            f"{one['hit_rate']:.1%}",
            _share(one["hit_rate"], one["oracle_hit_rate"]),
            *(f"{one['ttft_ms'][name]:.1f}" for name in ("p50", "p95")),
            "-" if one["sub_block_loss"] is None else f"{one['sub_block_loss']:.2%}",
            f"{one['hash_ms']:.2f}",
            f"{one['index_bytes'] / 2**20:.2f}",
        ]
        for one in results
    ]
    return in_columns(head, rows, left=("policy",))


def plot(outcomes: Sequence[Outcome], bounds: Bounds, path: Path) -> None:
    """Hit rate over time and the distribution of TTFT. Raises ``WrongUse`` without matplotlib, or for a bad path."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise WrongUse("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 4), layout="constrained")
    over_time, distribution = figure.subplots(1, 2)
    for outcome in outcomes:
        times, rates = hit_rate_over_time(outcome)
        over_time.plot(times, rates, label=outcome.settings.policy)
        ttft_ms = np.sort(outcome.ttft_s) * 1000
        distribution.plot(ttft_ms, np.arange(1, len(ttft_ms) + 1) / len(ttft_ms), label=outcome.settings.policy)
    over_time.axhline(bounds.oracle_hit_rate, color="black", linestyle=":", label="oracle")
    over_time.set(xlabel="seconds", ylabel="hit rate", ylim=(0, 1), title="Hit rate over time")
    distribution.set(xlabel="TTFT in ms", ylabel="share of requests", xscale="log", title="Time to first token")
    over_time.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise WrongUse(f"--plot {path}: {error}") from error


def hit_rate_over_time(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Ends of windows with equal numbers of requests, and the hit rate within each."""
    num_windows = min(_NUM_WINDOWS, len(outcome.ttft_s))
    tokens = np.array_split(outcome.prompt_tokens, num_windows)
    hits = np.array_split(outcome.hit_tokens, num_windows)
    ends = np.array_split(outcome.first_token_at_s, num_windows)
    rates = [float(hit.sum() / total.sum()) for hit, total in zip(hits, tokens, strict=True)]
    return [float(end[-1]) for end in ends], rates


def _milliseconds(outcome: Outcome, percent: int) -> float:
    return round(1000 * outcome.ttft_quantile_s(percent / 100), 3)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.3f}" if whole else "-"
