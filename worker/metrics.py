"""The worker's metrics and its hit rates.

A hit is a prompt token that was not computed, counted once, at the request's first admission, from the same number
that its ``usage`` tells. Synthetic traffic and what a preemption makes compute again count for neither side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from cache.events import Removed
from worker.request import OUTCOMES, Admitted, EngineSnapshot, StepReport

SETTLING_S = 60.0  # the steady hit rate leaves out the first minute, when every cache is cold
LOW_HIT_RATE = 0.3  # below it ``status`` says why

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_QUEUE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRates:
    """Tokens not computed / prompt tokens; ``verdict`` says why where that is little."""

    last_minute: float | None = None  # None: nobody asked
    last_hour: float = 0.0
    host_last_hour: float = 0.0  # the part of that which came back from host memory
    steady: float = 0.0  # since a minute after the start
    verdict: str = ""


class HitWindow:
    """Prompt tokens and hits of the last ``num_buckets`` times ``bucket_s`` seconds, in bounded memory."""

    def __init__(self, bucket_s: float, num_buckets: int) -> None:
        self._bucket_s = bucket_s
        self._num_buckets = num_buckets
        self._buckets: deque[list[int]] = deque()  # [number, prompt tokens, hits]

    def add(self, num_tokens: int, num_hits: int, now: float) -> None:
        """Count one request."""
        number = int(now // self._bucket_s)
        if not self._buckets or self._buckets[-1][0] != number:
            self._buckets.append([number, 0, 0])
            self._forget(number)
        self._buckets[-1][1] += num_tokens
        self._buckets[-1][2] += num_hits

    def rate(self, now: float) -> float | None:
        """Hits / prompt tokens; None without any."""
        self._forget(int(now // self._bucket_s))
        num_tokens = sum(bucket[1] for bucket in self._buckets)
        return sum(bucket[2] for bucket in self._buckets) / num_tokens if num_tokens else None

    def _forget(self, number: int) -> None:
        while self._buckets and self._buckets[0][0] <= number - self._num_buckets:
            self._buckets.popleft()


class WorkerMetrics:
    """All of them, in a registry of their own. ``view`` gives the engine's latest snapshot when someone looks."""

    def __init__(
        self,
        *,
        view: Callable[[], EngineSnapshot],
        now: float,
        compat: bool = False,
        host_tokens_per_s: float = 0.0,
    ) -> None:
        """``host_tokens_per_s``: how fast KV comes back from host memory; 0 where nothing does."""
        self.registry = CollectorRegistry()
        self._host_tokens_per_s = host_tokens_per_s
        self._view = view
        self._started_s = now
        self._minute = HitWindow(1.0, 60)
        self._hour = HitWindow(60.0, 60)
        self._host_hour = HitWindow(60.0, 60)
        self._steady_tokens = self._steady_hits = 0
        self._queries = self._counter("prefix_cache_queries_tokens", "Prompt tokens looked up, user traffic.")
        self._hits = self._counter("prefix_cache_hits_tokens", "Prompt tokens not computed, user traffic.", "tier")
        self._evictions = self._counter("evictions", "Block hashes whose last copy left a tier.", "reason")
        self._preemptions = self._counter("preemptions", "Requests that lost their blocks and are computed again.")
        self._saved = self._counter(
            "prefill_seconds_saved", "Prefill time that hits saved, at the learned speed. A cache saves no decode time."
        )
        self._synthetic = self._counter("synthetic_tokens", "Prompt tokens of pre-warm traffic.")
        self._ttft = self._histogram("ttft_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self._inter_token = self._histogram("inter_token_seconds", "Between two tokens of an answer.", _TOKEN_BUCKETS)
        self._queue = self._histogram("queue_seconds", "Arrival to first blocks.", _QUEUE_BUCKETS)
        self._output = self._counter("output_tokens", "Tokens of answers, user traffic.")
        self._ended = self._counter("ended_choices", "Choices that ended, by how, user traffic.", "outcome")
        self._steps = self._histogram(
            "step_seconds", "Engine steps: those that read prompts, and those that only decode.", _STEP_BUCKETS, "kind"
        )
        for outcome in OUTCOMES:
            self._ended.labels(outcome)
        self._tls_expiry = Gauge(
            "warmfront_worker_tls_certificate_expiry_timestamp_seconds",
            "When a certificate of this worker ends, in seconds since 1970.",
            ["certificate"],
            registry=self.registry,
        )
        self.registry.register(_CacheCollector(view))
        self._hits.labels("device")
        if host_tokens_per_s:
            self._hits.labels("host")
        self._compat = _Compat(self.registry, view) if compat else None

    def observe(self, report: StepReport, now: float) -> None:
        """Take in one step."""
        for admitted in report.admitted:
            self._admit(admitted, now)
        for seconds in report.ttfts_s:
            self._ttft.observe(seconds)
        for seconds in report.token_gaps_s:
            self._inter_token.observe(seconds)
        if report.num_preemptions:
            self._preemptions.inc(report.num_preemptions)
        self._output.inc(report.num_output_tokens)
        for outcome in report.outcomes:
            self._ended.labels(outcome).inc()
        for kind, steps_s in (("prefill", report.prefill_steps_s), ("decode", report.decode_steps_s)):
            for seconds in steps_s:
                self._steps.labels(kind).observe(seconds)
        for event in report.events.events if report.events else ():
            if isinstance(event, Removed):
                self._evictions.labels(event.reason.name.lower()).inc(len(event.keys))
        if self._compat is not None:
            self._compat.observe(report)

    def hit_rates(self, now: float) -> HitRates:
        """The hit rates as of ``now``, on the clock of ``observe``."""
        steady = self._steady_hits / self._steady_tokens if self._steady_tokens else 0.0
        return HitRates(
            last_minute=self._minute.rate(now),
            last_hour=self._hour.rate(now) or 0.0,
            host_last_hour=self._host_hour.rate(now) or 0.0,
            steady=steady,
            verdict=self._verdict() if self._steady_tokens and steady < LOW_HIT_RATE else "",
        )

    def tell_expiry(self, expires_s: Callable[[], float]) -> None:
        """When this worker's certificate ends, in seconds since 1970; asked at each look at the figures."""
        self._tls_expiry.labels("server").set_function(expires_s)

    def _admit(self, admitted: Admitted, now: float) -> None:
        if admitted.synthetic:
            self._synthetic.inc(admitted.num_prompt_tokens)
            return
        self._queue.observe(admitted.queue_s)
        num_tokens, num_hits = admitted.num_prompt_tokens, admitted.num_cached_tokens
        self._queries.inc(num_tokens)
        num_from_host = admitted.num_host_tokens
        self._hits.labels("device").inc(num_hits - num_from_host)
        if num_from_host:
            self._hits.labels("host").inc(num_from_host)
        speed = self._view().prefill_tokens_per_s
        if speed:
            copying_s = num_from_host / self._host_tokens_per_s if num_from_host else 0.0
            self._saved.inc(max(0.0, num_hits / speed - copying_s))
        self._minute.add(num_tokens, num_hits, now)
        self._hour.add(num_tokens, num_hits, now)
        self._host_hour.add(num_tokens, num_from_host, now)
        if now - self._started_s >= SETTLING_S:
            self._steady_tokens += num_tokens
            self._steady_hits += num_hits

    def _verdict(self) -> str:
        """Do prompts not match, or were their blocks evicted before they could?"""
        stats = self._view().stats
        if not stats.num_misses:
            return "prompts are shorter than a block, or all new tokens come after the cached front"
        if 2 * stats.num_misses_of_evicted >= stats.num_misses:
            return (
                f"{stats.num_misses_of_evicted} of {stats.num_misses} misses had stood here and were evicted: "
                "a larger pool (--kv-blocks), host memory behind it (--host-kv-blocks), more replicas or fewer tenants "
                "per replica would help"
            )
        return (
            f"{stats.num_misses_at_root} of {stats.num_requests} prompts differ in their first block from all before, "
            f"and only {stats.num_misses_of_evicted} of {stats.num_misses} misses were evicted: prompts do not match"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"warmfront_worker_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"warmfront_worker_{name}", text, labels, buckets=buckets, registry=self.registry)


class _CacheCollector(Collector):
    """What the engine's snapshot holds already, read when someone looks."""

    def __init__(self, view: Callable[[], EngineSnapshot]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        stats = view.stats
        blocks = GaugeMetricFamily(
            "warmfront_worker_kv_blocks", "KV blocks by state; host_* are in host memory.", labels=["state"]
        )
        blocks.add_metric(["total"], view.num_blocks)
        blocks.add_metric(["used"], view.num_used_blocks)
        blocks.add_metric(["cached"], view.num_cached_blocks)
        if view.num_host_blocks:
            blocks.add_metric(["host_total"], view.num_host_blocks)
            blocks.add_metric(["host_cached"], view.num_host_cached_blocks)
        yield blocks
        choices = GaugeMetricFamily(
            "warmfront_worker_choices",
            "Choices in the engine: waiting for a first token, and running.",
            labels=["state"],
        )
        choices.add_metric(["waiting"], view.waiting)
        choices.add_metric(["running"], view.running)
        yield choices
        yield GaugeMetricFamily(
            "warmfront_worker_waiting_tokens",
            "Tokens to compute before every choice has its first.",
            view.waiting_tokens,
        )
        yield CounterMetricFamily(
            "warmfront_worker_sub_block_tokens_lost",
            "Prompt tokens that stood in a block which differs further on, and were computed again.",
            stats.num_lost_tokens,
        )
        yield CounterMetricFamily(
            "warmfront_worker_recomputed_tokens",
            "Tokens that requests compute once more after they have lost their blocks.",
            stats.num_recomputed_tokens,
        )
        yield CounterMetricFamily(
            "warmfront_worker_demoted_blocks",
            "Block hashes that left the device for host memory.",
            stats.num_demoted_blocks,
        )
        yield CounterMetricFamily(
            "warmfront_worker_hash_collisions",
            "Blocks whose hash was that of other tokens (xxhash forms only); they are computed, not reused.",
            stats.num_collisions,
        )
        yield SummaryMetricFamily(
            "warmfront_worker_evicted_age_seconds",
            "For how long blocks that left the last tier had been idle.",
            count_value=stats.num_evicted_blocks,
            sum_value=stats.evicted_idle_s,
        )


class _Compat:
    """The same figures under the names of vLLM and SGLang, for dashboards that know those."""

    def __init__(self, registry: CollectorRegistry, view: Callable[[], EngineSnapshot]) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, registry=registry)

        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens not computed.")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens.")
        self._cached = counter("vllm:prompt_tokens_cached", "Prompt tokens not computed.")
        self._preemptions = counter("vllm:num_preemptions", "Preemptions.")
        self._output = counter("vllm:generation_tokens", "Tokens of answers.")
        self._success = Counter("vllm:request_success", "Ended requests.", ["finished_reason"], registry=registry)
        self._ttft = Histogram("vllm:time_to_first_token_seconds", "TTFT.", buckets=_TTFT_BUCKETS, registry=registry)
        self._inter_token = Histogram(
            "vllm:inter_token_latency_seconds", "Between tokens.", buckets=_TOKEN_BUCKETS, registry=registry
        )
        self._num_queries = self._num_hits = 0

        def usage() -> float:
            return view().num_used_blocks / max(1, view().num_blocks)

        def hit_rate() -> float:
            return self._num_hits / self._num_queries if self._num_queries else 0.0

        for name, value in (
            ("vllm:kv_cache_usage_perc", usage),
            ("vllm:gpu_cache_usage_perc", usage),
            ("vllm:num_requests_running", lambda: view().running),
            ("vllm:num_requests_waiting", lambda: view().waiting),
            ("sglang:cache_hit_rate", hit_rate),
            ("sglang:token_usage", usage),
        ):
            Gauge(name, f"{name}, as there.", registry=registry).set_function(value)

    def observe(self, report: StepReport) -> None:
        for one in report.admitted:
            if not one.synthetic:
                self._num_queries += one.num_prompt_tokens
                self._num_hits += one.num_cached_tokens
                for counter in (self._queries, self._prompt):
                    counter.inc(one.num_prompt_tokens)
                for counter in (self._hits, self._cached):
                    counter.inc(one.num_cached_tokens)
        self._preemptions.inc(report.num_preemptions)
        self._output.inc(report.num_output_tokens)
        for outcome in report.outcomes:
            self._success.labels(outcome if outcome in ("stop", "length") else "abort").inc()
        for seconds in report.ttfts_s:
            self._ttft.observe(seconds)
        for seconds in report.token_gaps_s:
            self._inter_token.observe(seconds)
