"""The table of flags: one entry per setting, the same name on every command that has it.

A flag belongs to each command whose configuration dataclass has its field (``WorkerConfig``, ``RouterConfig``,
``UpConfig``), and takes its default from there: this table has none of its own. A value comes from, first to last:
the command line, ``WARMFRONT_<FLAG>``, the YAML of ``--config FILE``, the default. ``config show`` prints which.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import click
import yaml
from click.core import ParameterSource

from cache.block_hash import ALGORITHMS
from cache.prefix_cache import EVICTION_POLICIES
from router.config import RouterConfig
from router.policy import POLICIES
from warmfront.errors import WrongUse
from warmfront.run_dir import RUN_DIR_ENV
from worker.config import WorkerConfig

ENV_PREFIX = "WARMFRONT_"
SEED_ENV = "WARMFRONT_HASH_SEED"
MAX_REPLICAS = 64  # of a cluster on one machine
Config = TypeVar("Config")


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


_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """Seconds, written as ``60s``, ``200ms``, ``5m`` or ``1h``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds; fails with one line for anything without a unit."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration: write 200ms, 60s, 5m or 1h", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


def format_duration(seconds: float) -> str:
    """The shortest spelling that ``Duration`` reads back to the same value."""
    return f"{seconds:.10g}s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.10g}ms"


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


def mask_url(url: str) -> str:
    """The URL without its password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{url.partition('://')[0]}://***"
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def read_secret(path: str) -> str:
    """The one line of a secret's file. Raises ``WrongUse`` when there is none."""
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUse(f"cannot read the secret in {path}: {error}") from error
    if not secret:
        raise WrongUse(f"{path} is empty: a secret was expected there")
    return secret


class NamedFolder(click.ParamType[str]):
    """``NAME=PATH``, with the path made absolute: parts run in folders of their own."""

    name = "name=path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The same text; what it must look like is checked by the configuration."""
        name, separator, path = str(value).partition("=")
        return f"{name}={Path(path).absolute()}" if separator and path else str(value)


PORT = click.IntRange(0, 65535)
COUNT = click.IntRange(min=0)
MAX_BLOCKS = 1 << 24  # of a pool: terabytes of KV, whatever the model
FILE = click.Path(path_type=Path)

# Section titles of --help stand between the flags.
_TABLE: tuple[Flag | str, ...] = (
    "Model",
    Flag("model", FILE, "Hugging Face folder or GGUF file. Default: the packaged SmolLM2."),
    Flag("served-model-name", str, "The name that clients ask for. Default: the model's own."),
    Flag("engine", click.Choice(["model", "simulated"]), "simulated: no model, all else real; for load tests."),
    "Cluster",
    Flag("replicas", click.IntRange(1, MAX_REPLICAS), "Workers to start; where there are GPUs, no more than those."),
    Flag("routers", click.IntRange(1, 16), "Routers to start; they share the HTTP and gRPC ports."),
    Flag("without-ray", click.BOOL, "Plain child processes instead of a local Ray cluster."),
    Flag("ready-file", FILE, "Write addresses, replicas and process ids there (JSON, mode 600) once all is ready."),
    Flag("log-dir", FILE, "Keep logs there. Default: in the run directory, which goes with the cluster."),
    Flag("start-deadline", Duration(), "Give up when not every replica is ready after this.", "start_deadline_s"),
    "Fleet",
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
    "Addresses and access",
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
        "worker-server-name", str, "Name that the workers' certificates must carry. Default: the address of each one."
    ),
    Flag("worker-token-file", str, "File with the secret that routers and workers share.", "worker_token", read_secret),
    Flag("reuse-port", click.BOOL, "Share the public ports with other routers of this machine."),
    Flag("trust-tenant-header", click.BOOL, "Take x-warmfront-tenant from the client."),
    "Placement",
    Flag("policy", click.Choice(POLICIES), "How a replica is chosen."),
    Flag(
        "min-ready-replicas",
        click.IntRange(min=1),
        "A router of a new fleet is not ready until so many replicas are; see docs/deploy.md.",
    ),
    "Flow control",
    Flag("max-inflight-requests", click.IntRange(min=1), "Requests sent and not ended; above it they are queued."),
    Flag("max-inflight-tokens", click.IntRange(min=1), "Prompt tokens of these; above it requests are queued."),
    Flag(
        "replica-requests",
        click.IntRange(min=1),
        "In flight on one replica, each choice of a request counted. Default: what its lease says it can use.",
    ),
    Flag(
        "replica-tokens", click.IntRange(min=1), "Prompt tokens waiting there. Default: what its lease says it can use."
    ),
    Flag("queue-requests", COUNT, "Requests that wait for a replica at most; above it clients get 429."),
    Flag("queue-tokens", COUNT, "Prompt tokens of these at most."),
    Flag("queue-timeout", Duration(), "A request that has waited this long gets 429.", "queue_timeout_s"),
    Flag("tenant-weights", str, "Shares of tenants in the queue, such as gold=4,free=0.5. Default: 1 each."),
    "Prefix cache",
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
    Flag("block-size", click.IntRange(8, 256), "Tokens per KV block."),
    Flag("token-reuse", bool, "Reuse the front of a block that matches only in part."),
    Flag("token-reuse-min", click.IntRange(min=1), "Tokens that are worth a copy at least."),
    Flag(
        "eviction-policy",
        click.Choice(EVICTION_POLICIES),
        "Which idle blocks go first: slru keeps what was hit apart from a flood of one-shot prompts.",
    ),
    "LoRA adapters",
    Flag("lora", NamedFolder(), "NAME=PATH of an adapter to load at start. Repeatable.", multiple=True),
    Flag("lora-dir", FILE, "Let adapters be loaded at run time from below this folder. Repeatable.", multiple=True),
    Flag("max-loras", click.IntRange(min=1), "Adapters in memory at once."),
    Flag("max-lora-rank", click.IntRange(min=1), "Largest rank of an adapter."),
    "Pre-warm",
    Flag("hot", bool, "Keep the hottest prefixes in Redis, in clear, for workers that start."),
    Flag("hot-salted", click.BOOL, "Those of requests with a cache_salt too."),
    Flag("hot-max-age", Duration(), "Forget a prefix that nobody has hit for this long.", "hot_max_age_s"),
    Flag("prewarm", bool, "Compute the fleet's hot prefixes before the first user request."),
    Flag("prewarm-deadline", Duration(), "Take user requests then at the latest.", "prewarm_deadline_s"),
    Flag("prewarm-target", click.FloatRange(0, 1, min_open=True), "Share of what hot prefixes save that is enough."),
    Flag("prewarm-from-fleet", str, "Take the hot prefixes of this fleet too, beside those of the own one."),
    "Memory and arithmetic",
    Flag(
        "gpu-memory-utilization",
        click.FloatRange(0.05, 1),
        "Share of the whole device's memory that this worker may use.",
    ),
    Flag("kv-blocks", click.IntRange(1, MAX_BLOCKS), "Blocks in the KV pool. Default: what the memory gives."),
    Flag(
        "host-kv-blocks",
        click.IntRange(0, MAX_BLOCKS),
        "Blocks in host memory that take what the pool evicts, to be copied back.",
    ),
    Flag("cpu-kv-bytes", click.IntRange(min=1), "Bytes of the KV pool on a CPU, where --kv-blocks is absent."),
    Flag(
        "kv-cache-dtype",
        click.Choice(["auto", "bfloat16", "float32", "int8", "fp8"]),
        "Type of the KV cache; auto: of the weights. int8, fp8: nearly twice the blocks, rounded.",
    ),
    Flag("dtype", click.Choice(["auto", "bfloat16", "float32"]), "Type of the weights."),
    Flag("device", str, "auto, cpu, cuda or cuda:N."),
    Flag("attention", str, "Attention backend: auto, sdpa, tiled, avx512 (CPU, compiled) or triton (CUDA)."),
    Flag("mode", click.Choice(["fast", "deterministic"]), "deterministic: warm and cold give the same bits (CPU)."),
    "Limits",
    Flag(
        "max-num-batched-tokens", click.IntRange(min=1), "Tokens per engine step. Default: 512 on a CPU, 8192 on CUDA."
    ),
    Flag("max-num-seqs", click.IntRange(min=1), "Requests computed at once."),
    Flag("max-model-len", click.IntRange(min=2), "Prompt and output together, in tokens. Default: the model's."),
    Flag("max-queue", click.IntRange(min=1), "Requests waiting at most; above it clients get 429."),
    "Simulated engine",
    Flag(
        "prefill-tokens-per-s",
        click.FloatRange(0, min_open=True),
        "Simulated engine: prompt tokens per second.",
    ),
    Flag(
        "host-tokens-per-s",
        click.FloatRange(0, min_open=True),
        "Simulated engine: tokens per second that come back from host memory.",
    ),
    Flag("decode-time", Duration(), "Simulated engine: of a step in which answers grow.", "decode_time_s"),
    Flag("time-scale", click.FloatRange(0, min_open=True), "Simulated engine: all takes so many times as long."),
    Flag("fault", str, "Simulated engine: die:TOKENS, hang:TOKENS, error:SHARE, lag:200ms, with commas between."),
    "Time",
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
    "Other",
    Flag("alive-file", FILE, "Touch this file twice a second while the router's event loop turns."),
    Flag("max-body-bytes", click.IntRange(min=1024), "Largest HTTP body; above it clients get 413."),
    Flag("continue-streams", bool, "Move a stream whose worker died to another replica."),
    Flag("log-json", click.BOOL, "Logs as JSON lines."),
    Flag("log-level", click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False), "How much is logged."),
    Flag("compat-metrics", click.BOOL, "Export the worker's metrics under vLLM's and SGLang's names too."),
)

FLAGS = tuple(entry for entry in _TABLE if isinstance(entry, Flag))
BY_PARAM = {flag.param: flag for flag in FLAGS}
_VARIABLES = {flag.env for flag in FLAGS} | {ENV_PREFIX + "CONFIG", ENV_PREFIX + "URL", SEED_ENV, RUN_DIR_ENV}
_VARIABLES |= {ENV_PREFIX + name for name in ("CA", "CERT", "KEY")}
_VARIABLES |= {ENV_PREFIX + name for name in ("DESIRED", "RAY_ADDRESS", "STATE_DIR")}  # of `controller`
CONFIGS: dict[str, tuple[type[Any], ...]] = {
    "up": (UpConfig, WorkerConfig, RouterConfig),
    "router": (RouterConfig,),
    "worker": (WorkerConfig,),
}
# What `up --help` explains itself.
_WHOLE_ON_UP = {"Model", "Cluster", "Fleet", "Addresses and access", "Memory and arithmetic", "General"}
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


class SectionedCommand(click.Command):
    """A command whose ``--help`` has the sections of the table."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes each section that has flags of this command, then what stands in no table."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        sections: dict[str, list[tuple[str, str]]] = {}
        title = ""
        for entry in (*_TABLE, "General"):
            if isinstance(entry, str):
                title = entry
            elif record := records.pop(entry.param, None):
                sections.setdefault(title, []).append(record)
        sections[title] = [record for record in records.values() if record]
        elsewhere = [title for title in sections if self.name == "up" and title not in _WHOLE_ON_UP]
        for title, rows in sections.items():
            if title == "General":
                _refer(formatter, elsewhere)
            if title not in elsewhere:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _refer(formatter: click.HelpFormatter, titles: Collection[str]) -> None:
    """Names the flags that `up` hands on, where the help of the part that takes them explains them."""
    title = ""
    handed_on: dict[tuple[str, ...], list[str]] = {}
    mine = flags_of("up")
    for entry in _TABLE:
        if isinstance(entry, str):
            title = entry
        elif title in titles and entry in mine:
            takers = tuple(part for part in ("router", "worker") if entry in flags_of(part))
            handed_on.setdefault(takers, []).append(f"--{entry.name}")
    for takers, names in handed_on.items():
        where = " or ".join(f"`warmfront {part} --help`" for part in takers)
        with formatter.section(f"For its {' and '.join(f'{part}s' for part in takers)}, explained by {where}"):
            for line in _filled(names, formatter.width - formatter.current_indent):
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _filled(words: Iterable[str], width: int) -> list[str]:
    """Words in lines, none of them cut at its dashes."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > width and lines[-1]:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def with_options(command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a click command the flags of ``command`` and ``--config``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for flag in reversed(flags_of(command)):
            spelling = f"--{flag.name}/--no-{flag.name}" if flag.type is bool else f"--{flag.name}"
            default = default_of(flag, command)
            function = click.option(
                spelling,
                flag.param,
                type=click.BOOL if flag.type is bool else flag.type,
                is_flag=flag.type in (bool, click.BOOL),
                multiple=flag.multiple,
                default=default,
                show_default=default is not None and flag.type is not click.BOOL,
                envvar=flag.env,
                help=flag.help,
            )(function)
        return click.option(
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            envvar=ENV_PREFIX + "CONFIG",
            is_eager=True,
            expose_value=False,
            callback=_load_file,
            help="YAML file of flags without their dashes, such as `kv-blocks: 4096`.",
        )(function)

    return decorate


def _load_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Puts a YAML file's values under the command's flags. One file may serve `up`, `router` and `worker`."""
    for name in unknown_variables(os.environ):
        click.echo(f"warmfront: {name} is no setting and changes nothing{_meant(name)}", err=True)
    if path is None:
        return
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise WrongUse(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise WrongUse(f"--config {path}: expected lines such as `kv-blocks: 4096`")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    unknown = sorted(set(values) - set(BY_PARAM))
    if unknown:
        raise WrongUse(f"--config {path}: no such flag: {', '.join(name.replace('_', '-') for name in unknown)}")
    for name, value in values.items():
        if BY_PARAM[name].multiple and isinstance(value, str):
            values[name] = [value]
    nested = sorted(
        name
        for name, value in values.items()
        if isinstance(value, dict) or (isinstance(value, list) and not BY_PARAM[name].multiple)
    )
    if nested:
        raise WrongUse(f"--config {path}: {nested[0].replace('_', '-')} takes one value")
    ctx.default_map = {
        **(ctx.default_map or {}),
        **{name: value for name, value in values.items() if value is not None},
    }
    ctx.meta["warmfront.config_file"] = path


def unknown_variables(names: Iterable[str]) -> list[str]:
    """The variables that look like a setting of ours and are none; Kubernetes makes some for each Service."""
    return sorted(
        name
        for name in names
        if name.startswith(ENV_PREFIX)
        and name not in _VARIABLES
        and not re.search(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_|$)", name)
    )


def _meant(name: str) -> str:
    near = difflib.get_close_matches(name, _VARIABLES, n=1, cutoff=0.8)
    return f"; is {near[0]} meant?" if near else ""


def fill(config: type[Config], params: Mapping[str, Any], **more: Any) -> Config:
    """A configuration from a command's parameters; ``more`` wins. Raises ``WrongUse`` for what cannot work."""
    known = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for flag in FLAGS:
        value = params.get(flag.param)
        for name in known.intersection(flag.fields) if value is not None else ():
            values[name] = value if flag.read is None else flag.read(str(value))
    if "hash_seed" in known and "hash_seed" not in values and os.environ.get(SEED_ENV):
        values["hash_seed"] = os.environ[SEED_ENV]
    values.update(more)
    try:
        return config(**values)
    except ValueError as error:
        raise WrongUse(str(error)) from error


def warn_of_typed_password(ctx: click.Context, param: str = "redis") -> None:
    """Says so when a Redis password stands among the arguments, which every user of this machine can list."""
    typed = ctx.get_parameter_source(param) is ParameterSource.COMMANDLINE
    if typed and ctx.params.get(param) and mask_url(ctx.params[param]) != ctx.params[param]:
        click.echo(
            "warmfront: every user of this machine can read the password in --redis: "
            f"use --redis-password-file or {BY_PARAM[param].env}",
            err=True,
        )


def source_of(ctx: click.Context, flag: Flag) -> str:
    """Where the value of a flag came from, in words."""
    match ctx.get_parameter_source(flag.param):
        case ParameterSource.COMMANDLINE:
            return "command line"
        case ParameterSource.ENVIRONMENT:
            return f"environment {flag.env}"
        case ParameterSource.DEFAULT_MAP:
            return f"file {ctx.meta['warmfront.config_file']}"
        case _:
            return "default"


def shown(flag: Flag, value: Any) -> str:
    """A value as `config show` prints it: durations with their unit, secrets masked, "-" for none."""
    if value is None or value == ():
        return "-"
    if flag.multiple:
        return ",".join(map(str, value))
    if flag.mask is not None:
        return flag.mask(str(value))
    if isinstance(flag.type, Duration):
        return format_duration(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
