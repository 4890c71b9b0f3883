"""``warmfront replay``: policies side by side on a recorded load."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cache.block_hash import HashScheme
from router.policy import POLICIES
from warmfront.console import stderr
from warmfront.errors import WrongUse
from warmfront.replay.capacity import costs_of
from warmfront.replay.report import Bounds, as_line, as_object, capacity_table, over_bound_note, plot, policy_table
from warmfront.replay.settings import Settings
from warmfront.replay.simulation import Outcome, blocks_of_longest, open_loop_speed, oracle_hit_rate, simulate
from warmfront.replay.trace import MOONCAKE_BLOCK_SIZE, Encode, Job, Turn, name_blocks, read_trace
from warmfront.values import FILE, Duration, Integer, Number

_DEFAULT_BLOCK_SIZE = 16


class Numbers(click.ParamType[list[int]]):
    """Whole numbers over 0, with commas between them."""

    name = "n[,n...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The numbers in order."""
        if isinstance(value, list):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdigit() and int(part) for part in parts):
            self.fail(f"{value!r}: write whole numbers over 0, with commas between them", param, ctx)
        return [int(part) for part in parts]


class Pools(click.ParamType[list[str]]):
    """Pool sizes: blocks, or per cent of the trace's distinct blocks over all replicas."""

    name = "n|n%[,...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The sizes as they were written."""
        if isinstance(value, list):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.removesuffix("%").isdigit() and int(part.removesuffix("%")) for part in parts):
            self.fail(f"{value!r}: write blocks such as 2669, or a share such as 40%", param, ctx)
        return parts


class Policies(click.ParamType[list[str]]):
    """Names of policies with commas between them, or ``all``."""

    name = "name[,name...]|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The names in order, each once."""
        if isinstance(value, list):
            return value
        names = list(POLICIES) if value == "all" else list(dict.fromkeys(str(value).split(",")))
        for name in names:
            if name not in POLICIES:
                self.fail(f"{name!r} is none of {', '.join(POLICIES)}, all", param, ctx)
        return names


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policy", "policies", type=Policies(), default="warmfront", show_default=True, help="What to compare.")
@click.option("--replicas", type=Numbers(), default="8", show_default=True, help="A list plans capacity.")
@click.option(
    "--kv-blocks",
    "pools",
    type=Pools(),
    default="40%",
    show_default=True,
    help="Blocks of each replica's cache, of the first --block-size (others get as many tokens); or a share of the "
    "trace's distinct blocks, over all replicas, at least room for its longest request. A list plans capacity.",
)
@click.option(
    "--block-size",
    "block_sizes",
    type=Numbers(),
    help="Tokens per block. A list plans capacity. Default: 16; 512 for a Mooncake trace.",
)
@click.option("--routers", type=Integer(1, 64), default=1, show_default=True, help="Requests go to them in turn.")
@click.option("--in-flight", type=Integer(min=1), help="Requests at once. Default: 4 per replica.")
@click.option("--open-loop", is_flag=True, help="Requests come when the trace says, not when others end.")
@click.option("--speed", type=Number(0, min_open=True), help="Open loop: so many times as fast as the trace.")
@click.option(
    "--load-share",
    type=Number(0, min_open=True),
    help="Open loop: at this share of the request rate that the fleet sustains with 4 in flight per replica.",
)
@click.option(
    "--host-kv-blocks",
    type=Integer(min=0),
    default=0,
    show_default=True,
    help="Blocks of each replica in host memory, behind its cache.",
)
@click.option(
    "--host-tokens-per-s",
    type=Number(0, min_open=True),
    default=400_000.0,
    show_default=True,
    help="Tokens that come back from there.",
)
@click.option("--prefill-tokens-per-s", type=Number(0, min_open=True), default=40_000.0, show_default=True)
@click.option(
    "--decode-time", type=Duration(), default="0.1ms", show_default=True, help="Of a step that makes answers longer."
)
@click.option(
    "--max-num-batched-tokens", type=Integer(min=1), default=512, show_default=True, help="Tokens of one step."
)
@click.option("--max-num-seqs", type=Integer(min=1), default=64, show_default=True, help="Requests in one step.")
@click.option("--event-delay", type=Duration(), default="1ms", show_default=True, help="From a step to the index.")
@click.option(
    "--heartbeat", type=Duration(), default="100ms", show_default=True, help="How often leases tell LRU ages."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of ties and random choices.")
@click.option("--limit", type=Integer(min=1), help="Only the trace's first requests.")
@click.option("--model", type=FILE, help="Whose tokenizer reads text and messages. Default: the packaged SmolLM2.")
@click.option("--live", is_flag=True, help="Over the wire: real routers and workers around simulated engines.")
@click.option(
    "--time-scale",
    type=Number(1),
    default=10.0,
    show_default=True,
    help="With --live everything takes so many times as long, so that this machine's own work weighs less.",
)
@click.option("--json", "as_json", is_flag=True, help="One object per policy, one a line.")
@click.option("--plot", "plot_path", type=FILE, help="Draw hit rate over time and TTFT there (needs matplotlib).")
def replay(
    *,
    trace: Path,
    policies: list[str],
    replicas: list[int],
    pools: list[str],
    block_sizes: list[int] | None,
    routers: int,
    in_flight: int | None,
    open_loop: bool,
    speed: float | None,
    load_share: float | None,
    host_kv_blocks: int,
    host_tokens_per_s: float,
    prefill_tokens_per_s: float,
    decode_time: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    event_delay: float,
    heartbeat: float,
    seed: int,
    limit: int | None,
    model: Path | None,
    live: bool,
    time_scale: float,
    as_json: bool,
    plot_path: Path | None,
) -> None:
    """What a fleet would have done with TRACE: the real placement, index, cache and scheduler under a virtual clock.

    TRACE is JSON lines, ours (timestamp_ms, session, token_ids | text | messages, output_tokens) or Mooncake's.
    """
    _check_loop(open_loop, in_flight, speed, load_share)
    turns = read_trace(trace, encode=_encoder(model), limit=limit)
    sizes = block_sizes or [MOONCAKE_BLOCK_SIZE if turns[0].hash_ids else _DEFAULT_BLOCK_SIZE]
    plans = len(replicas) * len(pools) * len(sizes) > 1
    if plans and plot_path is not None:
        raise WrongUse("--plot draws one setting: give --replicas, --kv-blocks and --block-size one value each")
    if plans and live:
        raise WrongUse("--live runs one setting: give --replicas, --kv-blocks and --block-size one value each")
    base = Settings(
        kv_blocks=1,
        host_kv_blocks=host_kv_blocks,
        host_tokens_per_s=host_tokens_per_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_s=decode_time,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        in_flight=in_flight,
        speed=speed or (1.0 if open_loop else None),
        num_routers=routers,
        event_delay_s=event_delay,
        heartbeat_s=heartbeat,
        seed=seed,
    )
    results: list[dict[str, Any]] = []
    outcomes: list[Outcome] = []
    notes: list[str] = []
    num_runs = len(sizes) * len(replicas) * len(pools) * len({*policies, "random"})
    with _progress() as progress:
        task = progress.add_task("", total=num_runs * len(turns))
        for block_size in sizes:
            scheme = HashScheme(block_size=block_size)
            jobs = name_blocks(turns, scheme)
            for num_replicas, pool in product(replicas, pools):
                settings = replace(
                    base,
                    num_replicas=num_replicas,
                    kv_blocks=_pool_blocks(pool, jobs, num_replicas, sizes[0], scheme),
                )
                if load_share is not None:
                    settings = replace(settings, speed=open_loop_speed(jobs, scheme, settings, load_share))
                bounds, outcomes = _compare(
                    jobs, scheme, settings, policies, time_scale if live else None, progress, task
                )
                for outcome in outcomes:
                    num_blocks = settings.kv_blocks * num_replicas
                    costs = costs_of(turns, scheme, num_blocks, outcome.final_caches) if plans else None
                    results.append(as_object(outcome, bounds, costs))
                    notes.append(over_bound_note(outcome))
                    if as_json:
                        click.echo(as_line(results[-1]))
    for note in filter(None, notes):
        click.echo(note, err=True)
    if not as_json:
        _print(turns, settings, sizes[-1], bounds, results, plans)
    if plot_path is not None:
        plot(outcomes, bounds, plot_path)


def _compare(
    jobs: Sequence[Job],
    scheme: HashScheme,
    settings: Settings,
    policies: list[str],
    live_scale: float | None,
    progress: Progress,
    task: Any,
) -> tuple[Bounds, list[Outcome]]:
    """Every policy's outcome, live where ``live_scale`` says how slowly; the bounds always by the virtual clock."""

    def run(policy: str, scale: float | None) -> Outcome:
        progress.update(task, description=f"{policy}, {settings.num_replicas} replicas")
        start = progress.tasks[task].completed

        def on_progress(num_ended: int) -> None:
            progress.update(task, completed=start + num_ended)

        one = replace(settings, policy=policy)
        if scale is None:
            return simulate(jobs, scheme, one, on_progress)
        from warmfront.replay.live import run_live

        return run_live([job.turn for job in jobs], scheme.block_size, one, scale, on_progress)

    outcomes = {policy: run(policy, live_scale) for policy in policies}
    by_lot = outcomes["random"] if "random" in outcomes and live_scale is None else run("random", None)
    oracle = oracle_hit_rate(jobs, scheme, settings.num_replicas * (settings.kv_blocks + settings.host_kv_blocks))
    return Bounds(oracle_hit_rate=oracle, random_hit_rate=by_lot.hit_rate), list(outcomes.values())


def _print(
    turns: Sequence[Turn],
    settings: Settings,
    block_size: int,
    bounds: Bounds,
    results: list[dict[str, Any]],
    plans: bool,
) -> None:
    num_tokens = sum(turn.num_tokens for turn in turns)
    click.echo(f"{len(turns):,} requests, {num_tokens:,} prompt tokens")
    if plans:
        click.echo(capacity_table(results))
        return
    host = f" and {settings.host_kv_blocks:,} in host memory" if settings.host_kv_blocks else ""
    click.echo(
        f"{settings.num_replicas} replicas with {settings.kv_blocks:,} blocks{host} of {block_size} tokens each; "
        f"hit rate of an oracle {bounds.oracle_hit_rate:.1%}, at random {bounds.random_hit_rate:.1%}"
    )
    click.echo(policy_table(results))


def _check_loop(open_loop: bool, in_flight: int | None, speed: float | None, load_share: float | None) -> None:
    if open_loop and in_flight is not None:
        raise WrongUse("--in-flight bounds a closed loop; with --open-loop requests come when the trace says")
    if not open_loop and (speed is not None or load_share is not None):
        raise WrongUse("--speed and --load-share need --open-loop")
    if speed is not None and load_share is not None:
        raise WrongUse("--speed and --load-share both say how fast requests come: give one")


def _pool_blocks(pool: str, jobs: Sequence[Job], num_replicas: int, first_block_size: int, scheme: HashScheme) -> int:
    """Blocks of each replica. A share is never less than the longest request takes."""
    if pool.endswith("%"):
        num_distinct = len(set().union(*(job.all_hashes for job in jobs)))
        return max(blocks_of_longest(jobs, scheme), num_distinct * int(pool[:-1]) // (100 * num_replicas))
    return max(1, int(pool) * first_block_size // scheme.block_size)


def _encoder(model: Path | None) -> Encode:
    """Token ids of text and messages, by a model's own tokenizer and template. Nothing is loaded before it is used."""
    encode: Encode | None = None

    def once(entry: dict[str, Any]) -> array[int]:
        nonlocal encode
        encode = encode or _load_encoder(model)
        return encode(entry)

    return once


def _load_encoder(model: Path | None) -> Encode:
    from warmfront_pb.v1 import inference_pb2, worker_pb2

    from router.errors import RouterError
    from router.tokenizer import ModelProfile
    from worker.loading import default_model_path
    from worker.loading.tokenizer import load_tokenizer
    from worker.models.config import ModelError

    try:
        files = load_tokenizer(model or default_model_path())
        profile = ModelProfile(
            worker_pb2.GetModelResponse(
                tokenizer_json=files.tokenizer_json,
                chat_template=files.chat_template or "",
                bos_token=files.bos_token or "",
                eos_token=files.eos_token or "",
                max_model_len=2**31 - 1,  # a recorded prompt is read whole, however long
            )
        )
    except (ModelError, RouterError) as error:
        raise WrongUse(f"--model: {error}") from error

    def encode(entry: dict[str, Any]) -> array[int]:
        if "text" in entry:
            packed = asyncio.run(profile.text_ids(entry["text"]))
        else:
            messages = [
                inference_pb2.ChatMessage(role=message["role"], content=message["content"])
                for message in entry["messages"]
            ]
            try:
                packed = asyncio.run(profile.chat_ids(inference_pb2.Chat(messages=messages)))
            except RouterError as error:
                raise ValueError(str(error)) from error
        return array("i", packed)

    return encode


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
