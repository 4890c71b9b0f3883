"""One part in the foreground, as containers run it: ``warmfront router``, ``warmfront worker``; and ``config show``."""

from __future__ import annotations

import socket
from typing import Any

import click

from router.config import RouterConfig
from warmfront.errors import WrongUse
from warmfront.options import fill, flags_of, shown, source_of, with_options
from worker.config import WorkerConfig


@click.command()
@with_options("router")
def router(**params: Any) -> int:
    """Run one router in the foreground until SIGTERM, which lets running streams end."""
    _need_redis(params)
    config = fill(RouterConfig, params)
    from router.main import run_router

    return run_router(config)


@click.command()
@with_options("worker")
@click.option("--plan", is_flag=True, help="Print what fits into the memory, and end.")
def worker(*, plan: bool, **params: Any) -> int:
    """Run one worker in the foreground until SIGTERM, which drains it."""
    if plan:
        from worker.plan import describe_plan

        click.echo(describe_plan(fill(WorkerConfig, params, redis_url="redis://unused", replica_id="plan")))
        return 0
    _need_redis(params)
    config = fill(WorkerConfig, {"replica_id": socket.gethostname(), **_given(params)})
    from worker.main import run_worker

    return run_worker(config)


@click.group()
def config() -> None:
    """Settings: command line, then WARMFRONT_<FLAG>, then the --config file, then the default."""


@config.group()
def show() -> None:
    """Print each setting of a command, its value, and where that came from; secrets are masked."""


def _show(command: str) -> click.Command:
    @with_options(command)
    @click.pass_context
    def print_settings(ctx: click.Context, /, **params: Any) -> None:
        flags = flags_of(command)
        rows = [(f"--{flag.name}", shown(flag, params[flag.param]), source_of(ctx, flag)) for flag in flags]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, value, source in rows:
            click.echo(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}")

    return click.command(command, help=f"Settings of `warmfront {command}`.")(print_settings)


for _command in ("up", "router", "worker"):
    show.add_command(_show(_command))


def _given(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _need_redis(params: dict[str, Any]) -> None:
    if not params["redis"]:
        raise WrongUse("--redis is missing: a part registers in the fleet's Redis; only `warmfront up` embeds one")
