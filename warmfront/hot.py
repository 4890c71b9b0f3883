"""``warmfront hot`` lists what a fleet hits most; ``warmfront prewarm`` computes it on a worker before it is needed.

Both read the fleet's Redis. A line of ``hot --json`` is a line of ``prewarm --from FILE``:
``{"hits": 12.5, "tokens": 512, "lora": "", "cache_salt": "", "token_ids": [...]}``; of a file's line only ``token_ids``
is needed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import uuid
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
from redis.exceptions import RedisError
from rich.text import Text
from warmfront_pb.v1 import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc

from cache.adapter import Adapter
from cache.block_hash import as_token_array
from cache.hot import HotPrefix, by_value, merged, saved_tokens
from common.redis_url import RedisUrlError, parse_redis_url
from common.tls import TlsError, TlsFiles
from common.worker_token import shown_token
from router.worker_client import WorkerTls
from warmfront.console import Grid, Progress, counted, stdout
from warmfront.down import find_url
from warmfront.errors import DeadlinePassed, Failure, WrongUse
from warmfront.files import fault_of, read_secret, read_text
from warmfront.flags import ENV_PREFIX
from warmfront.run_dir import all_run_dirs
from warmfront.store import embedded_url, unusable
from warmfront.values import FILE, Duration, Integer, Number, format_duration
from worker.prewarm import PRIORITY, RedisSource, fill, fill_unless_pressed, make_plan, overload_of
from worker.prewarm import Progress as Filled

_T = TypeVar("_T")
_LOOK_PERIOD_S = 0.2
_SHOWN_CHARS = 48  # of a prefix as text, in a line of the table
_ANY_AGE_S = 24 * 3600.0  # Redis forgets them before
_REFUSALS = (  # of one prefix: others may still be computed
    *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL),
    *(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED),
)


def _redis_options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option(
        "--redis-password-file",
        type=FILE,
        envvar=ENV_PREFIX + "REDIS_PASSWORD_FILE",
        help="File with the password of the URL's user.",
    )(function)
    return click.option(
        "--redis",
        envvar=ENV_PREFIX + "REDIS",
        help="URL of the fleet's Redis. Default: that of the `up` on this machine, or of WARMFRONT_URL's.",
    )(function)


_fleet_option = click.option("--fleet", default="default", show_default=True, envvar=ENV_PREFIX + "FLEET")


@click.command()
@_redis_options
@_fleet_option
@click.option("--limit", type=Integer(min=1), default=20, show_default=True, help="The first so many.")
@click.option("--json", "as_json", is_flag=True, help="All of them, one JSON object per line, with their token ids.")
@click.option("--text", "as_text", is_flag=True, help="Also as text, by the tokenizer of --model.")
@click.option("--model", type=FILE, help="Folder or GGUF file of that model. Default: the packaged one.")
def hot(
    *,
    redis: str | None,
    redis_password_file: Path | None,
    fleet: str,
    limit: int,
    as_json: bool,
    as_text: bool,
    model: Path | None,
) -> None:
    """List the prefixes that a fleet hits most, in order of value per block. They are prompts, in clear."""
    where = _Fleet(redis or _redis_of(fleet), fleet, redis_password_file)
    sets, now_ms = asyncio.run(_ask(where, lambda source: source.sets()))
    found = merged(sets, now_ms, _ANY_AGE_S)
    ranked = by_value(found, 1 << 40)
    decode = _decoder(model, {one.tokenizer for one in sets}) if as_text or model is not None else None
    if as_json:
        for one in ranked:
            prefix = one.prefix
            ids = _ids(prefix).tolist()
            line = {"hits": round(prefix.hits, 3), "tokens": prefix.num_tokens, "lora": prefix.lora}
            line |= {"cache_salt": prefix.cache_salt, "token_ids": ids}
            click.echo(json.dumps(line if decode is None else {**line, "text": decode(ids)}))
        return
    if not ranked:
        click.echo(f"fleet {fleet!r} has no hot prefixes: nothing was hit of late, or its routers run with --no-hot")
        return
    wanted = saved_tokens(found)
    words = ("adapter", "begins with token ids" if decode is None else "at its end")
    table = Grid(
        ("value", "tokens", "new", "share", *words), name="value", left=words, title=f"hot prefixes of fleet {fleet}"
    )
    done = 0.0
    for one in ranked[:limit]:
        done += one.saved_tokens
        ids = _ids(one.prefix).tolist()
        if decode is None:
            shown = f"{' '.join(map(str, ids[:8]))} ..."
        else:
            shown = _shortened(decode(ids[-one.num_new_tokens :]))
        numbers = (f"{one.value:.1f}", f"{one.prefix.num_tokens:,}", f"{one.num_new_tokens:,}", f"{done / wanted:.0%}")
        table.rows.append((*numbers, short_version(one.prefix.lora) or "-", Text(shown)))  # a prompt is no markup
    stdout.print(table)
    click.echo(
        f"hot prefixes: {len(ranked)}, different tokens: {sum(one.num_new_tokens for one in ranked):,}, "
        f"written by {counted(len(sets), 'router')}; share: of the prefill that all of them save"
    )


@click.command()
@click.option("--target", required=True, metavar="HOST:PORT", help="The worker's address.")
@click.option("--from", "source", default="redis", show_default=True, metavar="redis|FILE.jsonl")
@_redis_options
@_fleet_option
@click.option("--worker-token-file", envvar=ENV_PREFIX + "WORKER_TOKEN_FILE", help="Secret of routers and workers.")
@click.option(
    "--worker-ca", type=FILE, envvar=ENV_PREFIX + "WORKER_CA", help="Call it over TLS; it must be of this authority."
)
@click.option(
    "--worker-client-cert", type=FILE, envvar=ENV_PREFIX + "WORKER_CLIENT_CERT", help="Certificate to show to it."
)
@click.option("--worker-client-key", type=FILE, envvar=ENV_PREFIX + "WORKER_CLIENT_KEY", help="Its key.")
@click.option(
    "--worker-server-name",
    envvar=ENV_PREFIX + "WORKER_SERVER_NAME",
    help="Name that its certificate must carry. Default: its address.",
)
@click.option("--deadline", type=Duration(), default="60s", show_default=True, help="Give up after this.")
@click.option(
    "--min-hit-rate",
    type=Number(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Share of what hot prefixes save that is enough.",
)
def prewarm(
    *,
    target: str,
    source: str,
    redis: str | None,
    redis_password_file: Path | None,
    fleet: str,
    worker_token_file: str | None,
    worker_ca: Path | None,
    worker_client_cert: Path | None,
    worker_client_key: Path | None,
    worker_server_name: str | None,
    deadline: float,
    min_hit_rate: float,
) -> None:
    """Compute hot prefixes on a worker, as it does by itself when it starts. For a sidecar or a job.

    Waits for the worker to load. Ends with 0, also when the fleet is overloaded and needs it now, with 1 when less than
    --min-hit-rate could be computed, with 3 at the deadline.
    """
    if not re.fullmatch(r"[^\s:/]+:\d+|\[[0-9A-Fa-f:.]+\]:\d+", target):
        raise WrongUse(f"--target {target}: write HOST:PORT, as `warmfront status --json` has a worker's address")
    found = None if source == "redis" else read_file(Path(source))
    where = None if found is not None else _Fleet(redis or _redis_of(fleet), fleet, redis_password_file)
    token = shown_token(read_secret(worker_token_file)) if worker_token_file else ""
    files = TlsFiles.of_worker_client(worker_ca, worker_client_cert, worker_client_key)
    tls = _tls_to_worker(files, worker_server_name)
    filled = Filled()

    async def run(shown: Progress) -> None:
        def tell() -> None:
            shown.update(f"pre-warming {target}", f"pre-warming {target}: {_done(filled)}")

        async with asyncio.timeout(deadline), _channel(target, tls) as channel:
            await _fill(Target(channel, target, token), found, where, min_hit_rate, filled, tell)

    with Progress() as shown:
        try:
            asyncio.run(run(shown))
        except TimeoutError:
            how_far = _done(filled) if filled.wanted else "nobody answers there, or the model is still being loaded,"
            raise DeadlinePassed(f"{target}: {how_far} at the deadline of {format_duration(deadline)}") from None
    if filled.share < min_hit_rate and not filled.ended.startswith("pressed"):
        raise Failure(f"{target}: {_done(filled)}; --min-hit-rate is {min_hit_rate:g}, but no more fits or works")
    why = f" ({filled.ended})" if filled.ended.startswith("pressed") else ""
    click.echo(f"{target}: {_done(filled)}{why}")


class _Fleet(NamedTuple):
    """Where a fleet's Redis is asked."""

    url: str
    name: str
    password_file: Path | None

    def source(self) -> RedisSource:
        return RedisSource(self.url, self.name, password_file=self.password_file)


async def _fill(
    worker: Target,
    found: list[HotPrefix] | None,
    fleet: _Fleet | None,
    min_hit_rate: float,
    filled: Filled,
    tell: Callable[[], None],
) -> None:
    """Computes ``found`` on a worker or, for as long as ``fleet`` can wait, what that hits most.

    One of the two is given; ``tell`` is called before each prefix. Raises ``Failure``.
    """
    lease, model = await worker.describe()
    if fleet is not None:
        found = await _ask(fleet, lambda source: source.read(model.contract.tokenizer))
    assert found is not None
    plan, filled.wanted = make_plan(
        found,
        num_blocks=lease.cache.kv_blocks,
        block_size=model.contract.block_size,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        adapters={str(Adapter(one.name, one.version)) for one in lease.loras},
    )
    filled.num_prefixes = len(plan)

    async def compute(prefix: HotPrefix) -> bool:
        tell()
        return await worker.compute(prefix)

    if fleet is None:  # a file: no Redis tells of replicas that need help
        await fill(plan, compute, min_hit_rate, filled)
        return
    source = fleet.source()

    async def pressure() -> str:
        return overload_of(await source.others(lease.replica))

    try:
        await fill_unless_pressed(plan, compute, min_hit_rate, filled, pressure)
    finally:
        await source.close()


def _tls_to_worker(files: TlsFiles | None, server_name: str | None) -> WorkerTls | None:
    if files is None:
        return None
    try:
        files.check_client()
        return WorkerTls(files, server_name)
    except TlsError as error:
        raise WrongUse(str(error)) from error


def _channel(target: str, tls: WorkerTls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(target)
    return tls.channel(target, tls.certificates.current())


class Target:
    """The worker that is filled, over the wire."""

    def __init__(self, channel: grpc.aio.Channel, address: str, token: str) -> None:
        self._stub: Any = worker_pb2_grpc.WorkerStub(channel)
        self._address = address
        self._metadata = (("authorization", f"Bearer {token}"),)

    async def describe(self) -> tuple[common_pb2.ReplicaLease, worker_pb2.GetModelResponse]:
        """Its lease and its model, once it listens and has loaded it. Raises ``Failure``."""
        while True:
            try:
                model = await self._stub.GetModel(worker_pb2.GetModelRequest(), metadata=self._metadata)
                replica = await self._stub.GetReplica(worker_pb2.GetReplicaRequest(), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise self._failure(error) from error
                await asyncio.sleep(_LOOK_PERIOD_S)
                continue
            return replica.lease, model

    async def compute(self, prefix: HotPrefix) -> bool:
        """Have it compute a prefix; false when it refuses this one. Raises ``Failure`` when it is of no use."""
        adapter = Adapter.parse(prefix.lora)
        request = worker_pb2.WorkerGenerateRequest(
            request_id=f"prewarm-{uuid.uuid4().hex[:8]}",
            token_ids=prefix.token_ids,
            sampling=inference_pb2.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, seed=0),
            cache_salt=prefix.cache_salt,
            lora=adapter.name,
            lora_version=adapter.version,
            priority=PRIORITY,
            synthetic=True,
        )
        try:
            async for _ in self._stub.Generate(request, metadata=self._metadata):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                return False
            raise self._failure(error) from error
        return True

    def _failure(self, error: grpc.aio.AioRpcError) -> Failure:
        kind = WrongUse if error.code() is grpc.StatusCode.UNAUTHENTICATED else Failure
        return kind(f"{self._address}: {error.code().name}: {error.details()}")


def read_file(path: Path) -> list[HotPrefix]:
    """The prefixes in a file of JSON lines. Raises ``WrongUse`` naming the line."""
    prefixes: dict[tuple[str, str, bytes], HotPrefix] = {}
    for number, line in enumerate(read_text(path, f"--from {path}").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            token_ids = as_token_array(entry["token_ids"]).astype("<u4").tobytes()
            hits, lora, salt = float(entry.get("hits", 1)), str(entry.get("lora", "")), str(entry.get("cache_salt", ""))
            if hits < 0:
                raise ValueError("hits are below 0")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WrongUse(
                f'--from {path} line {number}: {fault_of(error)}; expected {{"token_ids": [1, 2], "hits": 3}}'
            ) from error
        prefixes[lora, salt, token_ids] = HotPrefix(token_ids, hits, lora, salt)
    return list(prefixes.values())


def _redis_of(fleet: str) -> str:
    """The Valkey that an `up` on this machine has embedded for this fleet: that of WARMFRONT_URL, else the only one.

    Raises ``WrongUse`` where it cannot be told.
    """
    running = [one for one in all_run_dirs() if one.owner() and one.cluster.get("fleet") == fleet]
    if named := os.environ.get(ENV_PREFIX + "URL"):
        running = [find_url(named, running)]
    found = {one.cluster.get("http", ""): url for one in running if (url := embedded_url(one.path))}
    if len(found) > 1:
        raise WrongUse(
            f"several clusters here have a fleet {fleet!r}; choose one with --redis or {ENV_PREFIX}URL: "
            f"{', '.join(sorted(found))}"
        )
    for url in found.values():
        return url
    raise WrongUse(
        f"--redis is missing: give the URL of fleet {fleet!r}, since no `up` of this machine embeds one for it"
    )


async def _ask(fleet: _Fleet, question: Callable[[RedisSource], Awaitable[_T]]) -> _T:
    """What the fleet's Redis answers. Raises ``WrongUse`` when it cannot be asked."""
    try:
        parse_redis_url(fleet.url).check_password_file(fleet.password_file)
    except RedisUrlError as error:
        raise WrongUse(str(error)) from error
    source = fleet.source()
    try:
        return await question(source)
    except (RedisError, OSError) as error:
        raise unusable(fleet.url, error) from error
    finally:
        await source.close()


def short_version(adapter: str) -> str:
    """An adapter's identity as people read it."""
    name, version = Adapter.parse(adapter)
    return f"{name}@{version[:12]}" if version else name


def _decoder(model: Path | None, tokenizers: Collection[str]) -> Callable[[list[int]], str]:
    """What token ids stand for. Raises ``WrongUse`` where the model's tokenizer cannot be read or is another."""
    try:
        from tokenizers import Tokenizer

        from worker.loading import default_model_path
        from worker.loading.tokenizer import load_tokenizer
        from worker.models.config import ModelError
    except ModuleNotFoundError as error:
        raise WrongUse(
            f"--text: {error}; a model is read by what a worker needs: pip install 'warmfront[worker]'"
        ) from error
    try:
        path = model or default_model_path()
        files = load_tokenizer(path)
        tokenizer = Tokenizer.from_str(files.tokenizer_json)
    except (ModelError, OSError, ValueError) as error:
        raise WrongUse(f"--model: {error}") from error
    if any(other != files.fingerprint for other in tokenizers):
        raise WrongUse(f"--model {path}: the hot prefixes were made by another tokenizer, so its text would be wrong")
    return partial(tokenizer.decode, skip_special_tokens=False)


def _shortened(text: str) -> str:
    """The last words of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"... {line[-_SHOWN_CHARS:]}"


def _ids(prefix: HotPrefix) -> npt.NDArray[np.uint32]:
    return np.frombuffer(prefix.token_ids, dtype="<u4")


def _done(filled: Filled) -> str:
    return (
        f"{filled.share:.0%} of what hot prefixes save, {filled.num_done} of {filled.num_prefixes} prefixes, "
        f"{filled.num_tokens:,} tokens"
    )
