"""The file that says what should run: read, checked to the last key, written.

It is YAML. Settings of routers and workers are their flags without the dashes, as in ``--config FILE``. Every error
names the key at fault. docs/deploy.md has the whole form.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from router.autoscale import Autoscale
from router.config import RouterConfig
from router.controller import STATUS_FILE
from router.launcher import Desired
from router.reconcile import Group, Rollout
from warmfront.errors import WrongUse
from warmfront.files import read_yaml
from warmfront.flags import BY_PARAM, ENV_PREFIX, flags_of
from warmfront.options import fill
from warmfront.run_dir import write_private
from warmfront.values import Duration
from worker.config import WorkerConfig

REDIS_ENV = ENV_PREFIX + "REDIS"
EACH_NODE = "each-node"  # a count: one router on each node that has its resources
DESIRED_FILE = "desired.yaml"  # in the run directory of an `up`
_CONFIGS: dict[str, type[Any]] = {"router": RouterConfig, "worker": WorkerConfig}
# What the file says once for all, or what each part is given by its controller.
SHARED = ("fleet", "redis", "redis_password_file", "worker_token_file")
_GIVEN = {
    "router": ("router_id",),
    "worker": ("replica_id", "port"),
}
_DURATION = Duration()
_START = {"router": "2m", "worker": "10m"}
_ROLLOUT = ("surge", "batch", "when_below", "deadline", "attempt")
_AUTOSCALE = ("min", "max", "target_wait", "up_window", "down_window")
_PLACEMENT = ("num_cpus", "num_gpus", "resources")


def read_desired(path: Path) -> Desired:
    """What the file says. Raises ``ValueError`` with the key that is wrong, ``OSError`` when it cannot be read."""
    content = read_yaml(path)
    try:
        return parse(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_desired(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the file in one step, mode 600. Raises ``ValueError`` when it would be refused, ``OSError``."""
    parse(dict(content))
    write_private(path, yaml.safe_dump(dict(content), sort_keys=False))


def read_status(state_dir: Path) -> dict[str, Any]:
    """What a controller has last told of its parts; empty where it has told nothing yet."""
    try:
        status: dict[str, Any] = json.loads((state_dir / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status


def parse(content: Any) -> Desired:
    """A file's content. Raises ``ValueError`` naming the key."""
    top = _mapping(content, "", (*SHARED, "routers", "workers", "suffix"))
    redis_url = top.get("redis") or os.environ.get(REDIS_ENV)
    if not redis_url:
        raise ValueError(f"redis: is missing, here and in {REDIS_ENV}")
    shared = {name: _text(top[name], _key(name)) for name in SHARED if top.get(name) is not None}
    groups, autoscale = [], None
    if top.get("routers") is not None:
        groups.append(_group(top["routers"], "router", "routers", shared, str(redis_url)))
    if top.get("workers") is not None:
        values = dict(top["workers"]) if isinstance(top["workers"], dict) else top["workers"]
        if isinstance(values, dict) and values.get("autoscale") is not None:
            autoscale = _autoscale(values.pop("autoscale"))
        groups.append(_group(values, "worker", "workers", shared, str(redis_url)))
    return Desired(
        fleet=str(shared.get("fleet", "default")),
        redis_url=str(redis_url),
        redis_password_file=Path(shared["redis_password_file"]) if "redis_password_file" in shared else None,
        groups=tuple(groups),
        autoscale=autoscale,
        suffix=str(top.get("suffix", "")),
    )


def _group(content: Any, role: str, where: str, shared: Mapping[str, Any], redis_url: str) -> Group:
    count = "count" if role == "router" else "replicas"
    values = _mapping(content, where, (count, *_PLACEMENT, "start_deadline", "attempt", "rollout", "settings"))
    if count not in values:
        raise ValueError(f"{where}.{count}: is missing")
    settings = _settings(values.get("settings") or {}, role, f"{where}.settings")
    try:
        config = fill(
            _CONFIGS[role],
            {**as_params({**settings, **shared}), "worker_token_file": None},
            redis_url=redis_url,
            **_checked_as(role, shared),
        )
    except WrongUse as error:
        raise ValueError(f"{where}.settings: {error.message}") from None
    each_node = role == "router" and values[count] == EACH_NODE
    if each_node and not values.get("resources"):
        raise ValueError(f"{where}.resources: is missing; {EACH_NODE} counts the nodes that have them")
    return Group(
        role=role,
        count=0 if each_node else _integer(values[count], f"{where}.{count}", 0),
        each_node=each_node,
        settings={**settings, **shared},
        placement=_placement(values, where),
        rollout=_rollout(values.get("rollout") or {}, f"{where}.rollout", surge=0 if role == "router" else 1),
        start_s=_duration(values.get("start_deadline", _START[role]), f"{where}.start-deadline"),
        drain_s=config.drain_deadline_s + (config.drain_notice_s if role == "router" else 0),
        attempt=_integer(values.get("attempt", 0), f"{where}.attempt", 0),
    )


def _checked_as(role: str, shared: Mapping[str, Any]) -> dict[str, Any]:
    """What a part gets on its own node stands for itself while the settings are checked."""
    token = "checked where the part runs" if "worker_token_file" in shared else None
    if role == "router":
        return {"worker_token": token or ""}
    return {"worker_token": token, "replica_id": "w0", "advertise": "node"}


def _settings(content: Any, role: str, where: str) -> dict[str, Any]:
    known = {flag.param: flag for flag in flags_of(role)}
    for name in map(_name, content if isinstance(content, dict) else ()):
        if name in SHARED:
            raise ValueError(f"{where}.{_key(name)}: stands at the top of the file, for routers and workers alike")
        if name in _GIVEN[role]:
            raise ValueError(f"{where}.{_key(name)}: each {role} is given its own")
    values = _mapping(content, where, known)
    for name, value in values.items():
        if isinstance(value, list) and known[name].multiple:
            values[name] = [_plain(one, known[name].type, f"{where}.{_key(name)}") for one in value]
        elif value is not None:
            values[name] = _plain(value, known[name].type, f"{where}.{_key(name)}")
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any, kind: Any, where: str) -> bool | int | float | str:
    """A value that ``kind`` takes, as JSON has it too: YAML makes a date of 2026-11-01, say."""
    if isinstance(value, dict | list | set | bytes):
        raise ValueError(f"{where}: takes one value")
    plain = value if isinstance(value, bool | int | float | str) else str(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(f"{where}: {plain} is no number")
    try:
        click.types.convert_type(kind).convert(plain, None, None)
    except click.BadParameter as error:
        raise ValueError(f"{where}: {error.message}") from None
    return plain


def _placement(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    placement: dict[str, Any] = {}
    for name in ("num_cpus", "num_gpus"):
        placement[name] = _number(values.get(name, 0), f"{where}.{_key(name)}")
    resources = values.get("resources") or {}
    if not isinstance(resources, dict):
        raise ValueError(f"{where}.resources: expected lines such as `warmfront_router: 1`")
    placement["resources"] = {
        str(name): _number(value, f"{where}.resources.{name}") for name, value in resources.items()
    }
    return placement


def _rollout(content: Any, where: str, *, surge: int) -> Rollout:
    values = _mapping(content, where, _ROLLOUT)
    below, deadline = values.get("when_below"), values.get("deadline")
    return Rollout(
        surge=_integer(values.get("surge", surge), f"{where}.surge", 0),
        batch=_integer(values.get("batch", 1), f"{where}.batch", 1),
        when_below_s=_duration(below, f"{where}.when-below") if below is not None else None,
        deadline_s=_duration(deadline, f"{where}.deadline") if deadline is not None else 1800.0,
        attempt=_integer(values.get("attempt", 0), f"{where}.attempt", 0),
    )


def _autoscale(content: Any) -> Autoscale:
    where = "workers.autoscale"
    values = _mapping(content, where, _AUTOSCALE)
    for name in ("min", "max"):
        if name not in values:
            raise ValueError(f"{where}.{name}: is missing")
        values[name] = _integer(values[name], f"{where}.{name}", 1)
    for name in ("target_wait", "up_window", "down_window"):
        if name in values:
            values[f"{name}_s"] = _duration(values.pop(name), f"{where}.{_key(name)}")
    return Autoscale(**values)


def as_params(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as click would have read them from the command line."""
    params: dict[str, Any] = {}
    for name, value in settings.items():
        kind = click.types.convert_type(BY_PARAM[name].type)
        many = value if isinstance(value, list | tuple) else [value]
        params[name] = tuple(map(kind, many)) if BY_PARAM[name].multiple else None if value is None else kind(value)
    return params


def own_ports(name: str, settings: Mapping[str, Any]) -> dict[str, int]:
    """The metrics port of a part that may share its machine with others of its role: the first and its number."""
    first = int(settings.get("metrics_port") or 0)
    shares = name.startswith("w") or settings.get("reuse_port")
    return {"metrics_port": first + number_of(name)} if first and shares else {}


def number_of(name: str) -> int:
    """The number in a part's name: 3 in router-3, w3 and w3-suffix."""
    found = re.search(r"\d+", name)
    return int(found[0]) if found else 0


def _mapping(content: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """Keys with underscores, all of them known. Raises ``ValueError`` naming the first that is not."""
    if not isinstance(content, dict):
        raise ValueError(f"{where or 'the file'}: expected lines such as `{_key(next(iter(known)))}: ...`")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = _name(key)
        path = f"{where}.{key}" if where else str(key)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"{path}: no such key{f'; is {_key(near[0])} meant?' if near else ''}")
        if name in values:
            raise ValueError(f"{path}: stands there twice")
        values[name] = value
    return values


def _name(key: Any) -> str:
    return str(key).replace("-", "_")


def _key(name: str) -> str:
    return name.replace("_", "-")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {value!r} is no text")
    return value


def _integer(value: Any, where: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where}: {value!r} is no whole number of {least} or more")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{where}: {value!r} is no number of 0 or more")
    return value


def _duration(value: Any, where: str) -> float:
    try:
        return _DURATION.convert(value, None, None)
    except click.BadParameter as error:
        raise ValueError(f"{where}: {error.message}") from None
