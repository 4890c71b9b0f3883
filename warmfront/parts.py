"""One part in the foreground, as containers run it: ``warmfront router``, ``warmfront worker``; and ``config show``."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace
from typing import Any

import click

from router.config import RouterConfig
from warmfront.errors import Served, WrongUse
from warmfront.flags import flags_of
from warmfront.options import SectionedCommand, fill, shown, source_of, warn_of_typed_password, with_options
from warmfront.values import Integer
from worker.config import WorkerConfig


@click.command(cls=SectionedCommand)
@with_options("router")
def router(**params: Any) -> int:
    """Run one router in the foreground until SIGTERM, which lets running streams end."""
    _need_redis(params)
    config = fill(RouterConfig, params)
    warn_of_typed_password(click.get_current_context())
    from router.main import run_router

    return Served(run_router(config))


@click.command(cls=SectionedCommand)
@with_options("worker")
@click.option("--plan", is_flag=True, help="Print what fits into the memory, and end.")
@click.option("--count", type=Integer(1, 256), default=1, help="So many simulated replicas in this process.")
def worker(*, plan: bool, count: int, **params: Any) -> int:
    """Run one worker in the foreground until SIGTERM, which drains it."""
    if plan:
        from worker.boot import plan_text

        config = fill(WorkerConfig, params, redis_url="redis://unused", replica_id="plan")
        try:
            click.echo(plan_text(config))
        except ValueError as error:
            raise WrongUse(str(error)) from error
        return 0
    _need_redis(params)
    config = fill(WorkerConfig, {"replica_id": _new_replica_id(), **_given(params)})
    warn_of_typed_password(click.get_current_context())
    from worker.main import run_workers

    return Served(run_workers(_copies(config, count)))


@click.group()
def config() -> None:
    """Settings: command line, then WARMFRONT_<FLAG>, then the --config file, then the default."""


@config.group(invoke_without_command=True)
@click.pass_context
def show(ctx: click.Context) -> None:
    """Print each setting of a command (of `up`, if none is named), its value and where that came from."""
    if ctx.invoked_subcommand is None:
        show.commands["up"].main([], standalone_mode=False)


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


def _copies(config: WorkerConfig, count: int) -> list[WorkerConfig]:
    """``count`` replicas of one configuration, each with a name and ports of its own."""
    if count == 1:
        return [config]
    if config.engine != "simulated":
        raise WrongUse("--count is for --engine simulated: one process runs one model")
    return [
        replace(
            config,
            replica_id=f"{config.replica_id}-{number}",
            port=config.port and config.port + number,
            metrics_port=config.metrics_port and config.metrics_port + number,
        )
        for number in range(count)
    ]


def _new_replica_id() -> str:
    """This host's name, and what keeps two workers of it apart: a newer boot of one id ends the older one."""
    return f"{socket.gethostname()}-{secrets.token_hex(3)}"


def _given(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _need_redis(params: dict[str, Any]) -> None:
    if not params["redis"]:
        raise WrongUse("--redis is missing: a part registers in the fleet's Redis; only `warmfront up` embeds one")
