"""What a router is told at its start. Read once, checked once, passed down."""

import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from cache.block_hash import ALGORITHMS
from common.address import is_loopback
from common.redis_url import RedisUrlError, parse_redis_url
from common.tls import TlsError, TlsFiles
from router.policy import POLICIES

_HANDSHAKE_S = 10.0
_FLEET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_WEIGHT = re.compile(r"\d+(\.\d+)?")


class ConfigError(ValueError):
    """A flag has a value that cannot work. The message names the flag and what to do."""


def _router_id() -> str:
    return f"router-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All of a router's settings. Raises ``ConfigError`` naming the flag at fault."""

    redis_url: str = field(repr=False)  # may hold a password
    redis_password_file: Path | None = None  # read for each connection
    fleet: str = "default"
    router_id: str = field(default_factory=_router_id)

    listen: str = "127.0.0.1"
    http_port: int = 8000  # 0: any free port
    grpc_port: int = 50051
    metrics_port: int | None = None  # None: /metrics stands on the HTTP port alone
    reuse_port: bool = False  # share HTTP and gRPC ports with other routers of this machine (SO_REUSEPORT)
    insecure_listen: bool = False
    tls_cert: Path | None = None  # of the public servers, PEM; read again when it changes
    tls_key: Path | None = None
    tls_client_ca: Path | None = None  # clients must show a certificate of this authority
    worker_ca: Path | None = None  # workers are called over TLS and must be of this authority; None: plain text
    worker_client_cert: Path | None = None  # what this router shows to workers
    worker_client_key: Path | None = None
    worker_server_name: str | None = None  # that workers' certificates must carry; None: the address they register

    worker_token: str = field(default="", repr=False)
    hash_seed: str | None = field(default=None, repr=False)  # None: the algorithm's default, where it has one
    hash_algorithm: str | None = None  # None: whatever the fleet has; else it must be the fleet's
    block_size: int | None = None  # tokens; None: whatever the fleet has; else it must be the fleet's

    policy: str = "warmfront"
    trust_tenant_header: bool = False
    hot: bool = True  # keep the hottest prefixes in Redis, for replicas that start; they are prompts in clear
    hot_salted: bool = False  # those of requests with a cache_salt too
    hot_max_age_s: float = 3600.0  # what nobody has hit for so long is forgotten
    heartbeat_s: float = 1.0  # how often replicas renew their lease; the router looks four times as often
    lease_s: float = 5.0  # a replica without a new heartbeat for this long is gone
    request_timeout_s: float = 600.0
    max_inflight_requests: int = 16_384  # sent and not ended; above it requests are queued
    max_inflight_tokens: int = 64 << 20  # of their prompts
    queue_requests: int = 1024  # held back at most; above it clients get 429
    queue_tokens: int = 8 << 20  # of their prompts
    queue_timeout_s: float = 30.0
    replica_requests: int | None = None  # in flight on one replica, by choices; None: what its lease says it can use
    replica_tokens: int | None = None  # prompt tokens that wait to be computed there; None: the same
    tenant_weights: str | None = None  # gold=4,free=0.5; 1 for all others
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 60.0  # for a request to arrive whole
    stall_timeout_s: float = 60.0  # a client that takes nothing of its answer for this long is cut off
    continue_streams: bool = True  # move a stream whose worker died to another replica
    min_ready_replicas: int = 1  # of a fleet that nobody has used yet; until then this router is not ready
    drain_notice_s: float = 0.5  # between "not ready" and the closed ports: load balancers look away first
    drain_deadline_s: float = 30.0  # streams still running this long after that are cut
    alive_file: Path | None = None  # gets the router's state while the event loop turns
    log_json: bool = False
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not _FLEET_NAME.fullmatch(self.fleet):
            raise ConfigError(f"--fleet {self.fleet!r}: use 1 to 63 letters, digits, dots, dashes and underscores")
        self._check_redis()
        self._check_listen()
        for flag, port in (("--http-port", self.http_port), ("--grpc-port", self.grpc_port)):
            _check_port(flag, port)
        if self.metrics_port is not None:
            _check_port("--metrics-port", self.metrics_port)
        if self.http_port and self.http_port == self.grpc_port:
            raise ConfigError(f"--http-port and --grpc-port are both {self.http_port}: give each its own")
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy {self.policy!r} is none of {', '.join(POLICIES)}")
        if self.hash_algorithm is not None and self.hash_algorithm not in ALGORITHMS:
            raise ConfigError(f"--prefix-caching-hash-algo {self.hash_algorithm!r} is none of {', '.join(ALGORITHMS)}")
        if self.block_size is not None and not 8 <= self.block_size <= 256:
            raise ConfigError(f"--block-size {self.block_size}: 8 to 256")
        for flag, seconds in (
            ("--heartbeat", self.heartbeat_s),
            ("--request-timeout", self.request_timeout_s),
            ("--hot-max-age", self.hot_max_age_s),
            ("--queue-timeout", self.queue_timeout_s),
            ("--body-timeout", self.body_timeout_s),
            ("--stall-timeout", self.stall_timeout_s),
        ):
            if not seconds > 0:
                raise ConfigError(f"{flag} {seconds:g}s: must be over 0")
        if not self.drain_deadline_s >= 0:
            raise ConfigError(f"--drain-deadline {self.drain_deadline_s:g}s is below 0")
        if not self.lease_s >= 2 * self.heartbeat_s:
            raise ConfigError(
                f"--lease {self.lease_s:g}s is under two heartbeats of {self.heartbeat_s:g}s: "
                "one late heartbeat would end a lease; make it longer"
            )
        if self.drain_notice_s < 0:
            raise ConfigError(f"--drain-notice {self.drain_notice_s:g}s: below 0")
        for flag, count, lowest in (
            ("--min-ready-replicas", self.min_ready_replicas, 1),
            ("--max-inflight-requests", self.max_inflight_requests, 1),
            ("--max-inflight-tokens", self.max_inflight_tokens, 1),
            ("--queue-requests", self.queue_requests, 0),
            ("--queue-tokens", self.queue_tokens, 0),
            ("--replica-requests", self.replica_requests, 1),
            ("--replica-tokens", self.replica_tokens, 1),
        ):
            if count is not None and count < lowest:
                raise ConfigError(f"{flag} {count}: at least {lowest}")
        _ = self.tenant_weights_by_name
        if self.max_body_bytes < 1024:
            raise ConfigError(f"--max-body-bytes {self.max_body_bytes}: at least 1024")

    @property
    def tenant_weights_by_name(self) -> dict[str, float]:
        """``tenant_weights``, read. Raises ``ConfigError``."""
        weights = {}
        for entry in self.tenant_weights.split(",") if self.tenant_weights else ():
            name, _, weight = entry.strip().rpartition("=")
            if not name or not _WEIGHT.fullmatch(weight) or not 0.01 <= float(weight) <= 100:
                raise ConfigError(f"--tenant-weights: {entry!r} is not TENANT=WEIGHT with a weight from 0.01 to 100")
            weights[name] = float(weight)
        return weights

    @property
    def handshake_timeout_s(self) -> float:
        """For a client to end its handshake, TLS included: until then it holds a descriptor and has sent nothing."""
        return min(_HANDSHAKE_S, self.body_timeout_s)

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of the public servers; None: plain text."""
        return TlsFiles.of_server(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def worker_tls_files(self) -> TlsFiles | None:
        """The files for calls to workers; None: plain text."""
        return TlsFiles.of_worker_client(self.worker_ca, self.worker_client_cert, self.worker_client_key)

    def _check_redis(self) -> None:
        if not self.redis_url:
            raise ConfigError("--redis is missing: give the URL of the fleet's Redis or Valkey")
        try:
            parse_redis_url(self.redis_url).check_password_file(self.redis_password_file)
        except RedisUrlError as error:
            raise ConfigError(str(error)) from error

    def _check_listen(self) -> None:
        try:
            if self.tls_files is not None:
                self.tls_files.check_server()
            if self.worker_tls_files is not None:
                self.worker_tls_files.check_client()
        except TlsError as error:
            raise ConfigError(str(error)) from error
        if self.worker_tls_files is None and self.worker_server_name is not None:
            raise ConfigError("--worker-server-name needs --worker-ca: without it workers are called in plain text")
        if not is_loopback(self.listen) and not self.insecure_listen and self.tls_cert is None:
            raise ConfigError(
                f"--listen {self.listen} is reachable from other machines without TLS: give --tls-cert and --tls-key, "
                "add --insecure-listen if the network is trusted, or listen on 127.0.0.1"
            )


def _check_port(flag: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(f"{flag} {port}: 0 to 65535")
