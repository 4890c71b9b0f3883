"""Killed, hung and restarted: workers, routers and Redis, with two hundred requests in flight."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.chaos import HANG_S, NUM_CLIENTS, STALL_S, Blow, draw_blows, survive


async def test_every_request_ends_right_or_with_a_clean_error_whatever_dies(tmp_path: Path) -> None:
    blows = [
        Blow(0.5, "kill", 0, 1.0),
        Blow(1.5, "hang", 1, HANG_S),
        Blow(2.5, "redis", 0, 1.5),
        Blow(5.0, "router", 1, 0.5),
        Blow(6.0, "kill", 2, 0.5),
    ]
    counts = await survive(tmp_path, blows, seed=1, after_s=1.0)
    print(counts)
    assert counts["right"] >= NUM_CLIENTS, counts


@pytest.mark.slow
async def test_an_engine_that_hangs_under_load_costs_nobody_an_answer(tmp_path: Path) -> None:
    counts = await survive(tmp_path, [Blow(0.5, "stall", 0, STALL_S)], seed=1, after_s=1.0)
    print(counts)
    assert counts["right"] >= NUM_CLIENTS, counts


SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEEDS", "1,2").split(",")]
MINUTES = float(os.environ.get("CHAOS_MINUTES", "2"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
async def test_minutes_of_blows_drawn_by_lot_change_no_text_and_leave_nothing_behind(tmp_path: Path, seed: int) -> None:
    blows = draw_blows(seed, 60 * MINUTES)
    print(f"again with CHAOS_SEEDS={seed} CHAOS_MINUTES={MINUTES:g}: {blows}")
    counts = await survive(tmp_path, blows, seed, after_s=5.0)
    print(counts)
    assert counts["right"] >= NUM_CLIENTS, counts
