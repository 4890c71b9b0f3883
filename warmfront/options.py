"""The table of flags as options of click's commands: help by sections, files of flags, configurations from parameters.

A value comes from, first to last: the command line, ``WARMFRONT_<FLAG>``, the YAML of ``--config FILE``, the default.
``config show`` prints which.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from warmfront.errors import WrongUse
from warmfront.files import read_yaml
from warmfront.flags import BY_PARAM, ENV_PREFIX, FLAGS, SECTIONS, SEED_ENV, Flag, default_of, flags_of
from warmfront.run_dir import RUN_DIR_ENV
from warmfront.values import THERE, Duration, format_duration, mask_url

Config = TypeVar("Config")

_VARIABLES = {flag.env for flag in FLAGS} | {ENV_PREFIX + "CONFIG", ENV_PREFIX + "URL", SEED_ENV, RUN_DIR_ENV}
_VARIABLES |= {ENV_PREFIX + name for name in ("CA", "CERT", "KEY")}
_VARIABLES |= {ENV_PREFIX + name for name in ("DESIRED", "RAY_ADDRESS", "STATE_DIR")}  # of `controller`
# What `up --help` explains itself.
_WHOLE_ON_UP = {"Model", "Cluster", "Fleet", "Addresses and access", "Memory and arithmetic"}


class SectionedCommand(click.Command):
    """A command whose ``--help`` has the sections of the table."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes each section that has flags of this command, then what stands in no table."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        sections = {
            title: [record for flag in flags if (record := records.pop(flag.param, None))]
            for title, flags in SECTIONS.items()
        }
        elsewhere = [title for title in sections if self.name == "up" and title not in _WHOLE_ON_UP]
        for title, rows in sections.items():
            if rows and title not in elsewhere:
                with formatter.section(title):
                    formatter.write_dl(rows)
        _refer(formatter, elsewhere)
        with formatter.section("General"):
            formatter.write_dl([record for record in records.values() if record])


def _refer(formatter: click.HelpFormatter, titles: Collection[str]) -> None:
    """Names the flags that `up` hands on, where the help of the part that takes them explains them."""
    handed_on: dict[tuple[str, ...], list[str]] = {}
    mine = flags_of("up")
    for flag in itertools.chain(*(SECTIONS[title] for title in titles)):
        if flag in mine:
            takers = tuple(part for part in ("router", "worker") if flag in flags_of(part))
            handed_on.setdefault(takers, []).append(f"--{flag.name}")
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
            type=THERE,
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
        content = read_yaml(path) or {}
    except (OSError, ValueError) as error:
        raise WrongUse(f"--config {error}") from error
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


def warn_of_typed_password(ctx: click.Context) -> None:
    """Says so when a Redis password stands among the arguments, which every user of this machine can list."""
    typed = ctx.get_parameter_source("redis") is ParameterSource.COMMANDLINE
    if typed and ctx.params.get("redis") and mask_url(ctx.params["redis"]) != ctx.params["redis"]:
        click.echo(
            "warmfront: every user of this machine can read the password in --redis: "
            f"use --redis-password-file or {BY_PARAM['redis'].env}",
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
