"""``warmfront``: the command line. Each command is imported when it is called, so that help is quick."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: nohup, or a script's &
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a command runs: an import that it meets ends in a traceback

import importlib
import logging
import os
import sys
from importlib.metadata import version
from typing import Any

import click
from click.core import ParameterSource

from warmfront.errors import Lost, Served

# gRPC reads it when it is imported, and else writes a line of its own about each client that fails a TLS handshake.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
PARTS = "warmfront.parts"
# Of the parts, which serve: who waits for an event of gRPC's looks at its sockets too. Else threads of gRPC's own do,
# and what arrives goes through two of them before it is ours: up to a third of what a streamed message costs.
PARTS_GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"

# name: (module, attribute, one line for --help). Lines come in the order in which a newcomer meets the commands.
COMMANDS = {
    "up": ("warmfront.up", "up", "Run a cluster on this machine, in the foreground."),
    "chat": ("warmfront.chat", "chat", "Talk to a cluster; see what each answer cost."),
    "status": ("warmfront.status", "status", "Show replicas, caches, hit rates and load."),
    "explain": ("warmfront.explain", "explain", "Show why requests went where they went."),
    "compare": ("warmfront.compare", "compare", "Send prompts cold, warm and to a worker without a cache."),
    "generate": ("warmfront.chat", "generate", "Answer one prompt, for scripts."),
    "replay": ("warmfront.replay.command", "replay", "Compare policies on a recorded load, without a cluster."),
    "hot": ("warmfront.hot", "hot", "List the prefixes that a fleet hits most."),
    "prewarm": ("warmfront.hot", "prewarm", "Compute hot prefixes on a worker before it is needed."),
    "drain": ("warmfront.status", "drain", "Take a replica out of service; running requests end."),
    "scale": ("warmfront.scale", "scale", "Change how many workers a cluster has."),
    "rollout": ("warmfront.rollout", "rollout", "Replace workers a few at a time, with other settings or the same."),
    "reset": ("warmfront.status", "reset", "Let every replica forget its cached blocks."),
    "lora": ("warmfront.lora", "lora", "Load, unload and list LoRA adapters."),
    "down": ("warmfront.down", "down", "End a cluster, or remove what a killed `up` left."),
    "controller": ("warmfront.controller", "controller", "Run routers and workers on a Ray cluster, as a file says."),
    "router": (PARTS, "router", "Run one router, for containers."),
    "worker": (PARTS, "worker", "Run one worker, for containers."),
    "config": (PARTS, "config", "Show settings and where each comes from."),
}


class _LazyGroup(click.Group):
    """Knows its commands by name and line of help; imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        if module == PARTS:
            os.environ.setdefault("GRPC_EXPERIMENTS", PARTS_GRPC_EXPERIMENTS)
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("warmfront"), message="warmfront %(version)s")
def cli() -> None:
    """Serve a language model from many replicas; send each request to the one that already holds its prefix.

    Start with `warmfront up`, then `warmfront chat` in another terminal.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # the command's module has been imported
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(arguments: list[str] | None = None) -> Any:
    """Runs a command and ends the process: 0 done, 1 it failed, 2 wrong use or environment, 3 a deadline passed."""
    try:
        code = cli.main(arguments, prog_name="warmfront", standalone_mode=False)
        if arguments is None and isinstance(code, Served):  # with arguments somebody else's process has called
            _leave(code)
        sys.exit(code or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"warmfront: {' '.join(error.format_message().split())}{_place_of(error)}", err=True)
        if arguments is None and isinstance(error, Lost):
            _leave(error.exit_code)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has left; Python's own last words would only be noise
        sys.exit(1)
    finally:
        _drop_what_nobody_reads()


def _leave(code: int) -> None:
    """Ends the process, whatever threads of C++ libraries still run."""
    logging.shutdown()
    _drop_what_nobody_reads()
    os._exit(code)


def _place_of(error: click.ClickException) -> str:
    """Where a bad value stands that nobody has typed: in a variable, or in the file of ``--config``."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None or not error.param.name:
        return ""
    match error.ctx.get_parameter_source(error.param.name):
        case ParameterSource.ENVIRONMENT:
            return f" ({error.param.envvar} in the environment)"
        case ParameterSource.DEFAULT_MAP:
            return f" (in {error.ctx.meta['warmfront.config_file']})"
    return ""


def _drop_what_nobody_reads() -> None:
    """What waits to be written to a terminal that was closed goes nowhere: at exit it would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
