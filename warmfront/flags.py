"""The table of flags: one entry per setting, the same name on every command that has it.

A flag belongs to each command whose configuration dataclass has its field (``WorkerConfig``, ``RouterConfig``,
``UpConfig``), and takes its default from there: this table has none of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cache.block_hash import ALGORITHMS
from cache.eviction import EVICTION_POLICIES
from router.config import RouterConfig
from router.policy import POLICIES
from warmfront.files import read_secret
from warmfront.values import COUNT, FILE, PORT, Duration, Integer, NamedFolder, Number, format_duration, mask_url
from worker.config import ATTENTION_BACKENDS, WorkerConfig

ENV_PREFIX = "WARMFRONT_"
SEED_ENV = "WARMFRONT_HASH_SEED"
MAX_REPLICAS = 64  # of a cluster on one machine
MAX_BLOCKS = 1 << 24  # of a pool: terabytes of KV, whatever the model


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """What `warmfront up` needs beyond the settings of its routers and workers."""

    redis_url: str | None = None  # None: an embedded Valkey of this cluster alone
    replicas: int = 2
    routers: int = 1
    metrics_port: int | None = None  # router i has metrics_port + i; None: off
    without_ray: bool = False
    ready_file: Path | None = None
    log_dir: Path | None = None  # None: in the run directory, which goes with the cluster
    start_deadline_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting: ``--name`` in the shell, ``fields`` in the dataclasses, ``WARMFRONT_NAME`` in the environment."""

    name: str
    type: Any  # a click type; bool makes the pair --name / --no-name
    help: str
    field: str = ""  # where it differs from the name; two where router and worker differ, with a blank between
    read: Callable[[str], str] | None = None  # from the flag's value to the field's, for secrets kept in files
    mask: Callable[[str], str] | None = None  # how `config show` prints it
    multiple: bool = False  # may be given several times; its fields hold tuples

    @property
    def fields(self) -> list[str]:
        """The dataclass fields that this flag fills."""
        return self.field.split() or [self.param]

    @property
    def param(self) -> str:
        """The name under which click and a YAML file know it."""
        return self.name.replace("-", "_")

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.param.upper()


# In the order of --help.
SECTIONS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        Flag("model", FILE, "Hugging Face folder or GGUF file. Default: the packaged SmolLM2."),
        Flag("served-model-name", str, "The name that clients ask for. Default: the model's own."),
        Flag("engine", click.Choice(["model", "simulated"]), "simulated: no model, all else real; for load tests."),
    ),
    "Cluster": (
        Flag("replicas", Integer(1, MAX_REPLICAS), "Workers to start; where there are GPUs, no more than those."),
        Flag("routers", Integer(1, 16), "Routers to start; they share the HTTP and gRPC ports."),
        Flag("without-ray", click.BOOL, "Plain child processes instead of a local Ray cluster."),
        Flag("ready-file", FILE, "Write addresses, replicas and process ids there (JSON, mode 600) once all is ready."),
        Flag("log-dir", FILE, "Keep logs there. Default: in the run directory, which goes with the cluster."),
        Flag("start-deadline", Duration(), "Give up when not every replica is ready after this.", "start_deadline_s"),
    ),
    "Fleet": (
        Flag("fleet", str, "Name of the set of replicas that may answer for each other."),
        Flag(
            "redis",
            str,
            "redis://, redis+sentinel:// or redis+cluster:// URL. `up` embeds a Valkey where it is absent.",
            "redis_url",
            mask=mask_url,
        ),
        Flag("redis-password-file", FILE, "File with the password of the URL's user; read for each connection."),
        Flag("replica-id", str, "The name under which this worker registers. Default: host name and a random suffix."),
        Flag("router-id", str, "The name under which this router publishes its load."),
    ),
    "Addresses and access": (
        Flag("http-port", PORT, "Port of the OpenAI HTTP API; 0 takes any free one."),
        Flag("grpc-port", PORT, "Port of the gRPC API; 0 takes any free one."),
        Flag(
            "metrics-port",
            PORT,
            "Port of /metrics, 0 for any free one. `up`: one each, routers first. Default: off.",
        ),
        Flag("listen", str, "Address to listen on."),
        Flag("port", PORT, "Port to listen on; 0 takes any free one."),
        Flag("advertise", str, "Host or host:port that routers use, where it differs from the one listened on."),
        Flag("insecure-listen", click.BOOL, "Allow plain text beyond loopback."),
        Flag("tls-cert", FILE, "Certificate chain (PEM) of the servers; on `up` of the public ones."),
        Flag("tls-key", FILE, "Its key (PEM, without a passphrase)."),
        Flag("tls-client-ca", FILE, "Let in only who shows a certificate of this authority."),
        Flag("worker-ca", FILE, "Call workers over TLS; they must be of this authority. Default: plain text."),
        Flag("worker-client-cert", FILE, "Certificate chain that this router shows to workers."),
        Flag("worker-client-key", FILE, "Its key."),
        Flag(
            "worker-server-name",
            str,
            "Name that the workers' certificates must carry. Default: the address of each one.",
        ),
        Flag(
            "worker-token-file",
            str,
            "File with the secret that routers and workers share.",
            "worker_token",
            read_secret,
        ),
        Flag("reuse-port", click.BOOL, "Share the public ports with others of this machine, once it can answer."),
        Flag("trust-tenant-header", click.BOOL, "Take x-warmfront-tenant from the client."),
    ),
    "Placement": (
        Flag("policy", click.Choice(POLICIES), "How a replica is chosen."),
        Flag(
            "min-ready-replicas",
            Integer(min=1),
            "A router of a new fleet is not ready until so many replicas are; see docs/deploy.md.",
        ),
    ),
    "Flow control": (
        Flag("max-inflight-requests", Integer(min=1), "Requests sent and not ended; above it they are queued."),
        Flag("max-inflight-tokens", Integer(min=1), "Prompt tokens of these; above it requests are queued."),
        Flag(
            "replica-requests",
            Integer(min=1),
            "In flight on one replica, each choice of a request counted. Default: what its lease says it can use.",
        ),
        Flag("replica-tokens", Integer(min=1), "Prompt tokens waiting there. Default: what its lease says it can use."),
        Flag("queue-requests", COUNT, "Requests that wait for a replica at most; above it clients get 429."),
        Flag("queue-tokens", COUNT, "Prompt tokens of these at most."),
        Flag("queue-timeout", Duration(), "A request that has waited this long gets 429.", "queue_timeout_s"),
        Flag("tenant-weights", str, "Shares of tenants in the queue, such as gold=4,free=0.5. Default: 1 each."),
    ),
    "Prefix cache": (
        Flag("enable-prefix-caching", bool, "Keep and reuse the KV of prompts seen before."),
        Flag(
            "prefix-caching-hash-algo",
            click.Choice(ALGORITHMS),
            "How blocks are named; the xxhash forms need a seed of yours.",
            "prefix_caching_hash_algo hash_algorithm",
        ),
        Flag(
            "prefix-caching-hash-seed-file",
            str,
            f"File with the fleet's secret hash seed (or {SEED_ENV}).",
            "hash_seed",
            read_secret,
        ),
        Flag("block-size", Integer(8, 256), "Tokens per KV block."),
        Flag("token-reuse", bool, "Reuse the front of a block that matches only in part."),
        Flag("token-reuse-min", Integer(min=1), "Tokens that are worth a copy at least."),
        Flag(
            "eviction-policy",
            click.Choice(EVICTION_POLICIES),
            "Which idle blocks go first: slru keeps what was hit apart from a flood of one-shot prompts.",
        ),
    ),
    "LoRA adapters": (
        Flag("lora", NamedFolder(), "NAME=PATH of an adapter to load at start. Repeatable.", multiple=True),
        Flag("lora-dir", FILE, "Let adapters be loaded at run time from below this folder. Repeatable.", multiple=True),
        Flag("max-loras", Integer(min=1), "Adapters in memory at once."),
        Flag("max-lora-rank", Integer(min=1), "Largest rank of an adapter."),
    ),
    "Pre-warm": (
        Flag("hot", bool, "Keep the hottest prefixes in Redis, in clear, for workers that start."),
        Flag("hot-salted", click.BOOL, "Those of requests with a cache_salt too."),
        Flag("hot-max-age", Duration(), "Forget a prefix that nobody has hit for this long.", "hot_max_age_s"),
        Flag("prewarm", bool, "Compute the fleet's hot prefixes before the first user request."),
        Flag("prewarm-deadline", Duration(), "Take user requests then at the latest.", "prewarm_deadline_s"),
        Flag("prewarm-target", Number(0, 1, min_open=True), "Share of what hot prefixes save that is enough."),
        Flag("prewarm-from-fleet", str, "Take the hot prefixes of this fleet too, beside those of the own one."),
    ),
    "Memory and arithmetic": (
        Flag(
            "gpu-memory-utilization",
            Number(0.05, 1),
            "Share of the whole device's memory that this worker may use.",
        ),
        Flag("kv-blocks", Integer(1, MAX_BLOCKS), "Blocks in the KV pool. Default: what the memory gives."),
        Flag(
            "host-kv-blocks",
            Integer(0, MAX_BLOCKS),
            "Blocks in host memory that take what the pool evicts, to be copied back.",
        ),
        Flag("cpu-kv-bytes", Integer(min=1), "Bytes of the KV pool on a CPU, where --kv-blocks is absent."),
        Flag(
            "kv-cache-dtype",
            click.Choice(["auto", "bfloat16", "float32", "int8", "fp8"]),
            "Type of the KV cache; auto: of the weights. int8, fp8: nearly twice the blocks, rounded.",
        ),
        Flag("dtype", click.Choice(["auto", "bfloat16", "float32"]), "Type of the weights."),
        Flag("device", str, "auto, cpu, cuda or cuda:N."),
        Flag(
            "attention",
            click.Choice(ATTENTION_BACKENDS),
            "Attention backend: auto, sdpa, tiled, avx512 (CPU, compiled) or triton (CUDA).",
        ),
        Flag("mode", click.Choice(["fast", "deterministic"]), "deterministic: warm and cold give the same bits (CPU)."),
    ),
    "Limits": (
        Flag("max-num-batched-tokens", Integer(min=1), "Tokens per engine step. Default: 512 on a CPU, 8192 on CUDA."),
        Flag("max-num-seqs", Integer(min=1), "Requests computed at once."),
        Flag("max-model-len", Integer(min=2), "Prompt and output together, in tokens. Default: the model's."),
        Flag("max-queue", Integer(min=1), "Requests waiting at most; above it clients get 429."),
    ),
    "Simulated engine": (
        Flag(
            "prefill-tokens-per-s",
            Number(0, min_open=True),
            "Simulated engine: prompt tokens per second.",
        ),
        Flag(
            "host-tokens-per-s",
            Number(0, min_open=True),
            "Simulated engine: tokens per second that come back from host memory.",
        ),
        Flag("decode-time", Duration(), "Simulated engine: of a step in which answers grow.", "decode_time_s"),
        Flag("time-scale", Number(0, min_open=True), "Simulated engine: all takes so many times as long."),
        Flag("fault", str, "Simulated engine: die:TOKENS, hang:TOKENS, error:SHARE, lag:200ms, with commas between."),
    ),
    "Time": (
        Flag("heartbeat", Duration(), "How often a worker renews its lease.", "heartbeat_s"),
        Flag("lease", Duration(), "A replica without a heartbeat for this long is gone.", "lease_s"),
        Flag("drain-deadline", Duration(), "On shutdown, running requests may take this long.", "drain_deadline_s"),
        Flag(
            "step-limit",
            Duration(),
            "A worker whose engine is longer in one step has hung: it ends itself.",
            "step_limit_s",
        ),
        Flag(
            "drain-notice",
            Duration(),
            "On shutdown, time for load balancers to see that a router is not ready.",
            "drain_notice_s",
        ),
        Flag("request-timeout", Duration(), "A request that runs longer is cut.", "request_timeout_s"),
        Flag("body-timeout", Duration(), "A request that takes longer to arrive whole gets 408.", "body_timeout_s"),
        Flag("stall-timeout", Duration(), "Cut off a client that takes nothing of its answer.", "stall_timeout_s"),
    ),
    "Other": (
        Flag("alive-file", FILE, "Write the router's state to this file twice a second while its event loop turns."),
        Flag("max-body-bytes", Integer(min=1024), "Largest HTTP body; above it clients get 413."),
        Flag("continue-streams", bool, "Move a stream whose worker died to another replica."),
        Flag("log-json", click.BOOL, "Logs as JSON lines, each key=value of a line a field."),
        Flag(
            "log-level",
            click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
            "How much is logged.",
        ),
        Flag("compat-metrics", click.BOOL, "Export the worker's metrics under vLLM's and SGLang's names too."),
    ),
}

FLAGS = tuple(itertools.chain(*SECTIONS.values()))
BY_PARAM = {flag.param: flag for flag in FLAGS}
CONFIGS: dict[str, tuple[type[Any], ...]] = {
    "up": (UpConfig, WorkerConfig, RouterConfig),
    "router": (RouterConfig,),
    "worker": (WorkerConfig,),
}
# `up` names the replicas and routers itself and gives each worker its own port on loopback.
_NOT_ON_UP = {"replica-id", "router-id", "port", "advertise", "reuse-port", "alive-file"}
_NOT_ON_UP |= {"worker-ca", "worker-client-cert", "worker-client-key", "worker-server-name"}


def flags_of(command: str) -> list[Flag]:
    """The flags of one command, in the table's order."""
    known = {field.name for config in CONFIGS[command] for field in dataclasses.fields(config)}
    return [
        flag for flag in FLAGS if known.intersection(flag.fields) and not (command == "up" and flag.name in _NOT_ON_UP)
    ]


def default_of(flag: Flag, command: str) -> Any:
    """The dataclass's default, as this flag would spell it; None where there is none or it is a secret."""
    if flag.read is not None:
        return None
    for config in CONFIGS[command]:
        for field in dataclasses.fields(config):
            if field.name in flag.fields and field.default not in (dataclasses.MISSING, ()):
                return format_duration(field.default) if isinstance(flag.type, Duration) else field.default
    return None
