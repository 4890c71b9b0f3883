"""What one worker is told: every flag that concerns it, checked once, passed down.

Nothing here reads the environment or a file; the command line does that and hands over plain values. What two
processes must agree on (model, block size, hash scheme, dtypes, mode, longest context) becomes the fleet's contract.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path

from cache.adapter import is_adapter_name
from cache.block_hash import ALGORITHMS
from cache.eviction import EVICTION_POLICIES, EvictionPolicy
from common.address import is_loopback
from common.redis_url import RedisUrlError, parse_redis_url
from common.tls import TlsError, TlsFiles
from common.worker_token import tokens_of

ATTENTION_BACKENDS = ("auto", "sdpa", "tiled", "avx512", "triton")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


class ConfigError(ValueError):
    """A setting that cannot work. The message names the flag and says what to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The settings of one worker, named as the flags are, with units. Raises ``ConfigError``.

    What may hold a secret (``redis_url``, ``worker_token``, ``hash_seed``) stays out of ``repr``.
    """

    replica_id: str  # the name under which this worker registers; a restart keeps it
    redis_url: str = field(repr=False)  # may hold a password
    redis_password_file: Path | None = None  # read for each connection
    fleet: str = "default"

    engine: str = "model"  # or "simulated": no model, the time that a cost model says, the rest real
    model: Path | None = None  # Hugging Face folder or GGUF file; None: the packaged SmolLM2
    served_model_name: str | None = None  # None: the name that the model's files give

    listen: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    advertise: str | None = None  # the host that routers reach this worker by, where it is not ``listen``
    insecure_listen: bool = False  # plain text beyond loopback
    tls_cert: Path | None = None  # of this worker's server, PEM; read again when it changes
    tls_key: Path | None = None
    tls_client_ca: Path | None = None  # routers must show a certificate of this authority
    worker_token: str | None = field(default=None, repr=False)  # a line each: those that routers may show

    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256_cbor"
    hash_seed: str | None = field(default=None, repr=False)  # required by the xxhash forms
    block_size: int = 16  # tokens
    token_reuse: bool = True  # reuse inside a block
    token_reuse_min: int = 4  # tokens worth a copy
    eviction_policy: EvictionPolicy = "slru"  # or "lru"
    kv_blocks: int | None = None  # in the pool, without the scratch block; None: by memory
    host_kv_blocks: int = 0  # in host memory, behind the pool; 0: none
    gpu_memory_utilization: float = 0.9  # share of the whole device memory
    cpu_kv_bytes: int | None = None  # the pool on a CPU where kv_blocks does not say; None: 1 GiB or less

    dtype: str = "auto"  # of the weights
    kv_cache_dtype: str = "auto"  # auto: that of the weights
    device: str = "auto"
    attention: str = "auto"
    mode: str = "fast"

    max_num_batched_tokens: int | None = None  # per step; None: 512 on a CPU, 8192 on CUDA
    max_num_seqs: int = 32  # computed at once
    max_model_len: int | None = None  # prompt and output; None: the model's own, cut to what the pool holds
    max_queue: int = 1024  # waiting; above it RESOURCE_EXHAUSTED

    lora: tuple[str, ...] = ()  # NAME=PATH each: adapters to load at start
    lora_dir: tuple[Path, ...] = ()  # adapters may be loaded from below these while it runs; empty: none may
    max_loras: int = 8  # in memory at once
    max_lora_rank: int = 64

    prewarm: bool = True  # compute the fleet's hottest prefixes before the first user request
    prewarm_deadline_s: float = 60.0  # READY then at the latest
    prewarm_target: float = 0.9  # share of what all hot prefixes save that is enough
    prewarm_from_fleet: str | None = None  # whose hot prefixes too, beside those of the own fleet

    heartbeat_s: float = 1.0
    lease_s: float = 5.0
    drain_deadline_s: float = 30.0
    step_limit_s: float = 120.0  # an engine step that lasts longer never ends: the device hangs
    # Of the simulated engine alone:
    prefill_tokens_per_s: float = 40_000.0
    decode_time_s: float = 0.02  # of a step in which answers grow
    host_tokens_per_s: float = 400_000.0  # that come back from host memory
    time_scale: float = 1.0  # everything takes so many times as long
    fault: str | None = None  # die:TOKENS, hang:TOKENS, error:SHARE, lag:200ms, with commas between them

    metrics_port: int | None = None  # None: off; 0: any free one
    compat_metrics: bool = False
    log_json: bool = False
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        self._check_names_and_addresses()
        try:
            if self.tls_files is not None:
                self.tls_files.check_server()
        except TlsError as error:
            raise ConfigError(str(error)) from error
        self._check_cache()
        self._check_engine()
        self._check_adapters()
        if not 0 < self.heartbeat_s <= self.lease_s / 2:
            raise ConfigError(
                f"--heartbeat {self.heartbeat_s:g}s and --lease {self.lease_s:g}s: a lease must last two heartbeats"
            )
        if not self.prewarm_deadline_s > 0:
            raise ConfigError(f"--prewarm-deadline {self.prewarm_deadline_s:g}s is not over 0: --no-prewarm is its off")
        if not 0 < self.prewarm_target <= 1:
            raise ConfigError(f"--prewarm-target {self.prewarm_target:g} is not over 0 and up to 1")
        if self.drain_deadline_s < 0:
            raise ConfigError(f"--drain-deadline {self.drain_deadline_s:g}s is below 0")
        if not self.step_limit_s > 0:
            raise ConfigError(f"--step-limit {self.step_limit_s:g}s is not over 0")

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of this worker's server; None: plain text."""
        return TlsFiles.of_server(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier: none where nothing is cached."""
        return self.host_kv_blocks if self.enable_prefix_caching else 0

    @property
    def own_adapters(self) -> dict[str, Path]:
        """The adapters to load at start: folders by name."""
        return {name: Path(path) for name, _, path in (one.partition("=") for one in self.lora)}

    @property
    def adapter_folders(self) -> list[tuple[str, Path]]:
        """The folders that must be there, with the flag that names each."""
        own = [(f"--lora {name}", folder) for name, folder in self.own_adapters.items()]
        return [*(("--lora-dir", folder) for folder in self.lora_dir), *own]

    @property
    def has_adapters(self) -> bool:
        """Whether memory must be kept for adapters."""
        return bool(self.lora or self.lora_dir)

    def _check_names_and_addresses(self) -> None:
        names = [("--fleet", self.fleet), ("--replica-id", self.replica_id)]
        names += [("--prewarm-from-fleet", self.prewarm_from_fleet)] if self.prewarm_from_fleet is not None else []
        for flag, name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{flag} {name!r}: letters, digits, dot, dash and underscore, up to 128")
        if not self.redis_url:
            raise ConfigError("--redis is missing: a worker registers in Redis; give a URL like redis://host:6379/0")
        try:
            parse_redis_url(self.redis_url).check_password_file(self.redis_password_file)
        except RedisUrlError as error:
            raise ConfigError(str(error)) from error
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not between 0 and 65535")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"--metrics-port {self.metrics_port} is not between 0 and 65535")
        if self.worker_token is not None and min(map(len, tokens_of(self.worker_token)), default=0) < 8:
            raise ConfigError("--worker-token-file: a token is shorter than 8 characters")
        if self.advertise and not _is_reachable(self.advertise):
            raise ConfigError(f"--advertise {self.advertise}: write HOST, HOST:PORT, an IPv6 address or [IPv6]:PORT")
        if not is_loopback(self.listen):
            if not self.insecure_listen and self.tls_cert is None:
                raise ConfigError(
                    f"--listen {self.listen} is reachable from outside and plain text: "
                    "give --tls-cert and --tls-key, or add --insecure-listen where the network is trusted"
                )
            if self.worker_token is None:
                raise ConfigError(f"--listen {self.listen} needs --worker-token-file: without it anyone may call")
            if self.listen in ("0.0.0.0", "::", "") and not self.advertise:  # noqa: S104
                raise ConfigError(f"--listen {self.listen} needs --advertise: the host that routers reach this one by")

    def _check_cache(self) -> None:
        if self.prefix_caching_hash_algo not in ALGORITHMS:
            raise ConfigError(
                f"--prefix-caching-hash-algo {self.prefix_caching_hash_algo!r} is none of {', '.join(ALGORITHMS)}"
            )
        if self.prefix_caching_hash_algo.startswith("xxhash") and not self.hash_seed:
            raise ConfigError(
                f"--prefix-caching-hash-algo {self.prefix_caching_hash_algo} needs a secret seed that the fleet "
                "shares: set WARMFRONT_HASH_SEED or --prefix-caching-hash-seed-file"
            )
        if not 8 <= self.block_size <= 256:
            raise ConfigError(f"--block-size {self.block_size} is not between 8 and 256")
        if self.kv_blocks is not None and self.kv_blocks < 1:
            raise ConfigError(f"--kv-blocks {self.kv_blocks} is below 1")
        if self.host_kv_blocks < 0:
            raise ConfigError(f"--host-kv-blocks {self.host_kv_blocks} is below 0")
        if not 1 <= self.token_reuse_min < self.block_size:
            raise ConfigError(
                f"--token-reuse-min {self.token_reuse_min} is not between 1 and {self.block_size - 1}, inside a block"
            )
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigError(f"--eviction-policy {self.eviction_policy} is not one of {', '.join(EVICTION_POLICIES)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization {self.gpu_memory_utilization:g} is not over 0 and up to 1")
        if self.cpu_kv_bytes is not None and self.cpu_kv_bytes < 1 << 20:
            raise ConfigError(f"--cpu-kv-bytes {self.cpu_kv_bytes} is below 1 MiB")

    def _check_adapters(self) -> None:
        for flag, number in (("--max-loras", self.max_loras), ("--max-lora-rank", self.max_lora_rank)):
            if number < 1:
                raise ConfigError(f"{flag} {number} is below 1")
        for one in self.lora:
            name, separator, path = one.partition("=")
            if not separator or not path or not is_adapter_name(name):
                raise ConfigError(
                    f"--lora {one!r} is not NAME=PATH with a name of up to 128 letters, digits and . _ : / -"
                )
        if len(self.own_adapters) < len(self.lora):
            raise ConfigError("--lora: two adapters have the same name")
        if len(self.lora) > self.max_loras:
            raise ConfigError(f"--lora: {len(self.lora)} adapters are more than --max-loras {self.max_loras}")

    def _check_engine(self) -> None:
        choices = (
            ("--engine", self.engine, ("model", "simulated")),
            ("--dtype", self.dtype, ("auto", "float32", "bfloat16")),
            ("--kv-cache-dtype", self.kv_cache_dtype, ("auto", "bfloat16", "float32", "int8", "fp8")),
            ("--attention", self.attention, ATTENTION_BACKENDS),
            ("--mode", self.mode, ("fast", "deterministic")),
            ("--log-level", self.log_level.upper(), ("DEBUG", "INFO", "WARNING", "ERROR")),
        )
        for flag, value, allowed in choices:
            if value not in allowed:
                raise ConfigError(f"{flag} {value!r} is none of {', '.join(allowed)}")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device {self.device!r} is none of auto, cpu, cuda, cuda:N")
        if self.fault and self.engine != "simulated":
            raise ConfigError("--fault is for --engine simulated")
        rates = (
            ("--prefill-tokens-per-s", self.prefill_tokens_per_s),
            ("--host-tokens-per-s", self.host_tokens_per_s),
            ("--time-scale", self.time_scale),
        )
        for flag, rate in rates:
            if not rate > 0:
                raise ConfigError(f"{flag} {rate:g} is not over 0")
        if self.decode_time_s < 0:
            raise ConfigError(f"--decode-time {self.decode_time_s:g}s is below 0")
        positive = (
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-model-len", self.max_model_len),
            ("--max-queue", self.max_queue),
        )
        for flag, number in positive:
            if number is not None and number < 1:
                raise ConfigError(f"{flag} {number} is below 1")
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {budget} is below --max-num-seqs {self.max_num_seqs}: "
                "a step must have room for one token of each"
            )


def _is_reachable(advertised: str) -> bool:
    """Whether it names a host, and a port where it has one. Only an IPv6 address with a port stands in brackets."""
    found = re.fullmatch(r"([\w.-]+|\[[^]]+\]):(\d{1,5})", advertised)
    host, port = (found[1], int(found[2])) if found else (advertised, 1)
    if not 0 < port < 1 << 16:
        return False
    try:
        ipaddress.IPv6Address(host.strip("[]") if found else host)
    except ValueError:
        return re.fullmatch(r"[\w.-]+", host) is not None
    return True
