"""The router's figures, in a registry of their own so that two routers in one process do not mix."""

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_PREFIX = "warmfront_router"
_DECISION_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_TOKEN_BUCKETS = (-4096, -1024, -256, -64, -16, -1, 0, 16, 64, 256, 1024, 4096)
INDEX_MODES = ("live", "snapshot", "local")
REFUSED = "refused"  # a batch that is none, or not the replica's; the other outcomes are those of cache.prefix_index


class RouterMetrics:
    """Every collector of this router."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"{_PREFIX}_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", text, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests by their status.", ("code",))
        self._by_status: dict[str, Counter] = {}
        self.decision_seconds = histogram(
            "decision_seconds", "Look-up and placement of one request, tokens and keys given.", _DECISION_BUCKETS_S
        )
        self.ttft_seconds = histogram("ttft_seconds", "From a request's arrival to its first token.", _TTFT_BUCKETS_S)
        self.matched_tokens = counter("matched_tokens", "Prompt tokens that the chosen replicas held.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of all requests.")
        self.prediction_error_tokens = histogram(
            "prediction_error_tokens", "Predicted less actual cached tokens of a request.", _TOKEN_BUCKETS
        )
        self.regret_tokens = counter("regret_tokens", "Tokens the best holder held more than the chosen replica.")
        self.index_blocks = gauge("index_blocks", "Blocks that the index credits to a replica.", ("replica",))
        self.index_event_lag_seconds = histogram(
            "index_event_lag_seconds",
            "From the making of a batch of events to its standing in the index.",
            _LAG_BUCKETS_S,
        )
        self.index_batches = counter(
            "index_batches", "Batches of events by what became of them in the index.", ("outcome",)
        )
        self.index_gaps = counter("index_gaps", "Gaps found in event numbers.")
        self.index_resyncs = counter("index_resyncs", "Snapshots asked for again.")
        self.index_bad_events = counter("index_bad_events", "Events that made no sense and were skipped.")
        self.index_parentless_blocks = gauge(
            "index_parentless_blocks",
            "Blocks in the index that no prompt can match: what is before them is missing.",
        )
        self.index_partial_replicas = gauge(
            "index_partial_replicas", "Replicas of which the index has forgotten blocks to stay within its bound."
        )
        self.redis_bad_keys = counter(
            "redis_bad_keys", "Keys found with another type or with bytes that make no sense.", ("key",)
        )
        self.index_mode = gauge("index_mode", "1 for what the index is now: live, snapshot or local.", ("mode",))
        self.retries = counter("retries", "Requests sent to another replica before a token.", ("reason",))
        self.failovers = counter("failovers", "Answers continued, or begun anew, on another replica.")
        self.queue_seconds = histogram(
            "queue_seconds", "For how long requests were held back, those that were.", _TTFT_BUCKETS_S
        )
        self.queue_requests = gauge("queue_requests", "Requests held back because the replicas they want are full.")
        self.queue_tokens = gauge("queue_tokens", "Prompt tokens of these.")
        self.rejected = counter(
            "rejected", "Requests that were refused or given up before they were sent.", ("reason",)
        )
        self.stalled = counter("stalled", "Clients cut off because they took nothing of their answer.")
        self.inflight_tokens = gauge("inflight_tokens", "Uncached tokens sent and waited for.", ("replica",))
        self.prewarm_tokens = counter(
            "prewarm_tokens", "Tokens of hot prefixes, times their hits, that replicas held when they became ready."
        )
        self.prewarm_missed = counter("prewarm_missed", "The same of those that they did not hold.")
        self.tokenizer_cache_hits = counter("tokenizer_cache_hits", "Prompt tokens that were not encoded again.")
        self.redis_up = gauge("redis_up", "Whether Redis answered the last look at the leases.")
        self.replicas_ready = gauge("replicas_ready", "Replicas that take user traffic.")
        self.replicas_hung = gauge("replicas_hung", "Replicas whose engines stand still in one step.")
        self.waiting_seconds = gauge(
            "waiting_seconds", "Prefill that waits in the fleet, in seconds of one replica's work."
        )
        self.work = gauge("work", "The fleet's load in replicas: how many it needs at least.")
        self.replicas_refused = gauge("replicas_refused", "Replicas refused for their contract or protocol.")
        self.tls_expiry = gauge(
            "tls_certificate_expiry_timestamp_seconds",
            "When a certificate of this router ends, in seconds since 1970.",
            ("certificate",),
        )

    def count_request(self, status: str) -> None:
        """One request has ended. The series of a status is looked up once: the client library takes its time."""
        series = self._by_status.get(status)
        if series is None:
            series = self._by_status[status] = self.requests.labels(status)
        series.inc()

    def set_index_mode(self, mode: str) -> None:
        """One of ``INDEX_MODES``."""
        for name in INDEX_MODES:
            self.index_mode.labels(name).set(name == mode)

    def drop_index(self, replica: str) -> None:
        """Forget the series of a replica that has gone."""
        for metric in (self.index_blocks, self.inflight_tokens):
            with contextlib.suppress(KeyError):  # versions of the client library raise for a label they never saw
                metric.remove(replica)

    def text(self) -> bytes:
        """Everything, in the Prometheus text format."""
        return generate_latest(self.registry)
