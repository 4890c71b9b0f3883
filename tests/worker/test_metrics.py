from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from cache.events import EventBatch, RemovalReason, Removed
from cache.stats import CacheStats
from worker.metrics import SETTLING_S, HitWindow, WorkerMetrics
from worker.request import Admitted, EngineSnapshot, StepReport


class Bench:
    def __init__(self, *, compat: bool = False, host_tokens_per_s: float = 0.0, **stats: Any) -> None:
        self.view = EngineSnapshot(
            num_blocks=100,
            num_used_blocks=25,
            num_cached_blocks=60,
            prefill_tokens_per_s=100.0,
            stats=CacheStats(**stats),
        )
        self.metrics = WorkerMetrics(
            view=lambda: self.view, now=0.0, compat=compat, host_tokens_per_s=host_tokens_per_s
        )

    def admit(
        self, num_tokens: int, num_cached: int, now: float, *, synthetic: bool = False, num_host: int = 0
    ) -> None:
        one = Admitted(
            queue_s=0.1,
            num_prompt_tokens=num_tokens,
            num_cached_tokens=num_cached,
            synthetic=synthetic,
            num_host_tokens=num_host,
        )
        self.metrics.observe(StepReport(admitted=[one]), now)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def test_hits_are_tokens_not_computed_and_save_time_at_the_learned_speed() -> None:
    bench = Bench()
    bench.admit(100, 0, 1.0)
    bench.admit(100, 80, 2.0)
    assert bench.value("warmfront_worker_prefix_cache_queries_tokens_total") == 200
    assert bench.value("warmfront_worker_prefix_cache_hits_tokens_total", tier="device") == 80
    assert bench.value("warmfront_worker_prefill_seconds_saved_total") == pytest.approx(0.8)
    assert bench.value("warmfront_worker_queue_seconds_count") == 2


def test_hits_from_host_memory_are_told_apart_and_save_less() -> None:
    bench = Bench(host_tokens_per_s=200.0)
    assert bench.value("warmfront_worker_prefix_cache_hits_tokens_total", tier="host") == 0
    bench.admit(100, 80, 1.0, num_host=50)
    assert bench.value("warmfront_worker_prefix_cache_hits_tokens_total", tier="device") == 30
    assert bench.value("warmfront_worker_prefix_cache_hits_tokens_total", tier="host") == 50
    assert bench.value("warmfront_worker_prefill_seconds_saved_total") == pytest.approx(0.8 - 0.25)
    assert bench.metrics.hit_rates(1.0).last_minute == pytest.approx(0.8)
    assert bench.value("warmfront_worker_kv_blocks", state="host_total") is None
    bench.view = replace(bench.view, num_host_blocks=9, num_host_cached_blocks=4)
    assert bench.value("warmfront_worker_kv_blocks", state="host_total") == 9
    assert bench.value("warmfront_worker_kv_blocks", state="host_cached") == 4


def test_synthetic_traffic_is_kept_apart() -> None:
    bench = Bench()
    bench.admit(100, 50, 1.0, synthetic=True)
    assert bench.value("warmfront_worker_synthetic_tokens_total") == 100
    assert bench.value("warmfront_worker_prefix_cache_queries_tokens_total") == 0
    assert bench.metrics.hit_rates(1.0).last_minute is None


def test_steps_tell_of_preemptions_evictions_and_times() -> None:
    bench = Bench(
        num_lost_tokens=7,
        num_evicted_blocks=4,
        evicted_idle_s=20.0,
        num_recomputed_tokens=11,
        num_demoted_blocks=12,
        num_collisions=1,
    )
    batch = EventBatch("w0", "g", 1, (Removed(array("Q", [1, 2, 3]), RemovalReason.EVICTED),))
    bench.metrics.observe(StepReport(events=batch, num_preemptions=2, ttfts_s=[0.2], token_gaps_s=[0.01, 0.02]), 1.0)
    assert bench.value("warmfront_worker_preemptions_total") == 2
    assert bench.value("warmfront_worker_evictions_total", reason="evicted") == 3
    assert bench.value("warmfront_worker_ttft_seconds_count") == 1
    assert bench.value("warmfront_worker_inter_token_seconds_count") == 2
    assert bench.value("warmfront_worker_sub_block_tokens_lost_total") == 7
    assert bench.value("warmfront_worker_recomputed_tokens_total") == 11
    assert bench.value("warmfront_worker_demoted_blocks_total") == 12
    assert bench.value("warmfront_worker_hash_collisions_total") == 1
    assert bench.value("warmfront_worker_evicted_age_seconds_sum") == 20
    assert bench.value("warmfront_worker_evicted_age_seconds_count") == 4
    assert bench.value("warmfront_worker_kv_blocks", state="cached") == 60


def test_load_output_outcomes_and_the_length_of_steps_are_told() -> None:
    bench = Bench()
    assert bench.value("warmfront_worker_ended_choices_total", outcome="poisoned") == 0
    report = StepReport(
        num_output_tokens=5,
        outcomes=["stop", "stop", "cancelled", "poisoned"],
        prefill_steps_s=[0.3],
        decode_steps_s=[0.02, 0.03],
    )
    bench.metrics.observe(report, 1.0)
    assert bench.value("warmfront_worker_output_tokens_total") == 5
    assert bench.value("warmfront_worker_ended_choices_total", outcome="stop") == 2
    assert bench.value("warmfront_worker_ended_choices_total", outcome="poisoned") == 1
    assert bench.value("warmfront_worker_step_seconds_count", kind="prefill") == 1
    assert bench.value("warmfront_worker_step_seconds_sum", kind="decode") == pytest.approx(0.05)
    bench.view = replace(bench.view, waiting=3, running=2, waiting_tokens=700)
    assert bench.value("warmfront_worker_choices", state="waiting") == 3
    assert bench.value("warmfront_worker_choices", state="running") == 2
    assert bench.value("warmfront_worker_waiting_tokens") == 700


def test_a_window_forgets_what_is_older_than_it() -> None:
    window = HitWindow(1.0, 60)
    window.add(100, 100, 0.5)
    window.add(100, 0, 30.0)
    assert window.rate(59.9) == 0.5
    assert window.rate(60.0) == 0.0
    assert window.rate(500.0) is None


def test_the_steady_hit_rate_leaves_out_the_first_minute() -> None:
    bench = Bench()
    bench.admit(100, 0, 10.0)
    bench.admit(100, 90, SETTLING_S)
    rates = bench.metrics.hit_rates(SETTLING_S)
    assert rates.steady == 0.9
    assert rates.last_minute == 0.45
    assert rates.last_hour == 0.45
    assert rates.verdict == ""


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        ({"num_requests": 10, "num_misses": 8, "num_misses_of_evicted": 6}, "6 of 8 misses had stood here"),
        (
            {"num_requests": 10, "num_misses": 8, "num_misses_at_root": 7, "num_misses_of_evicted": 1},
            "7 of 10 prompts differ in their first block",
        ),
        ({"num_requests": 10}, "shorter than a block"),
    ],
)
def test_a_low_hit_rate_has_a_verdict(stats: dict[str, int], words: str) -> None:
    bench = Bench(**stats)
    bench.admit(100, 10, 100.0)
    assert words in bench.metrics.hit_rates(100.0).verdict


def test_the_names_of_vllm_and_sglang_are_there_when_asked_for() -> None:
    bench = Bench(compat=True)
    bench.admit(100, 40, 1.0)
    assert bench.value("vllm:prefix_cache_queries_total") == 100
    assert bench.value("vllm:prefix_cache_hits_total") == 40
    assert bench.value("vllm:prompt_tokens_cached_total") == 40
    assert bench.value("vllm:kv_cache_usage_perc") == 0.25
    assert bench.value("sglang:cache_hit_rate") == 0.4
    bench.metrics.observe(StepReport(num_output_tokens=7, outcomes=["stop", "length", "deadline", "cancelled"]), 1.0)
    assert bench.value("vllm:generation_tokens_total") == 7
    assert bench.value("vllm:request_success_total", finished_reason="stop") == 1
    assert bench.value("vllm:request_success_total", finished_reason="abort") == 2
    assert Bench().value("vllm:prefix_cache_queries_total") is None
