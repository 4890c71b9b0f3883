"""``warmfront status``, the replicas as a router sees them, ``warmfront drain`` and ``reset``."""

from __future__ import annotations

import json
import time
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from warmfront.client import Address, Client, address_options, changed_address_options
from warmfront.console import Grid, counted, say, stdout
from warmfront.errors import DeadlinePassed, Failure
from warmfront.values import Duration

_STYLES = {"READY": "green", "WARMING": "yellow", "STARTING": "yellow", "DRAINING": "yellow", "GONE": "red"}


@click.command()
@address_options
@click.option("--json", "as_json", is_flag=True, help="Print the object of GET /v1/replicas.")
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
def status(*, address: Address, as_json: bool, watch: bool) -> None:
    """Show replicas: state, KV blocks used and cached, hit rate and what it means, load.

    "hits" leaves out the first minute after a replica's start, and is "-" until a request came after it.
    """
    client = Client(address, timeout_s=10)
    if as_json:
        while True:
            click.echo(json.dumps(client.get("/v1/replicas")))
            if not watch:
                return
            time.sleep(1)
    while not watch or not stdout.is_terminal:  # elsewhere Live would show nothing before its end
        stdout.print(render(client.get("/v1/replicas"), client.url))
        if not watch:
            return
        time.sleep(1)
    with Live(render(client.get("/v1/replicas"), client.url), console=stdout, refresh_per_second=4) as live:
        while True:
            time.sleep(1)
            live.update(render(client.get("/v1/replicas"), client.url))


@click.command()
@click.argument("replica")
@changed_address_options
@click.option("--deadline", type=Duration(), default="60s", show_default=True, help="What runs then is cut.")
@click.option("--no-wait", is_flag=True, help="Return as soon as the replica takes no new requests.")
@click.option("--json", "as_json", is_flag=True, help="Print the object of POST /v1/drain.")
def drain(*, replica: str, address: Address, deadline: float, no_wait: bool, as_json: bool) -> None:
    """Take REPLICA out of service: no new requests go there, running ones end, its process exits."""
    client = Client(address, timeout_s=10)
    listed = client.get("/v1/replicas")["replicas"]
    generation = next((one.get("generation") for one in listed if one["id"] == replica), None)
    if [one["id"] for one in listed if one["state"] == "READY" and not one.get("fault")] == [replica]:
        say(f"{replica} is the last one that is READY: requests are refused until another is")
    answer = client.post("/v1/drain", {"replica": replica, "deadline_ms": int(deadline * 1000)})
    running = counted(answer.get("running", 0), "request")
    click.echo(json.dumps(answer) if as_json else f"{replica}: draining, {running} running")
    end = time.monotonic() + deadline
    while not no_wait:
        try:
            now = _find(client, replica)
            if now.get("generation") != generation or now["state"] == "GONE":
                if not as_json:
                    click.echo(f"{replica}: drained")
                return
            left = f"still has {counted(now['running'], 'request')}"
        except Failure as error:  # that a router does not answer says nothing of the replica
            left = f"may still run: {error.message}"
        if time.monotonic() > end:
            raise DeadlinePassed(f"{replica} {left}, after {deadline:g} s")
        time.sleep(0.2)


@click.command()
@changed_address_options
@click.option("--json", "as_json", is_flag=True, help="Print the object of POST /v1/cache/reset.")
def reset(*, address: Address, as_json: bool) -> None:
    """Let every replica forget its cached blocks; one whose requests hold blocks refuses, and the exit code is 1."""
    answer = Client(address, timeout_s=30).post("/v1/cache/reset", {})
    if as_json:
        click.echo(json.dumps(answer))
    else:
        for one in answer["replicas"]:
            what = counted(one["blocks"], "block") + " dropped" if one["outcome"] == "reset" else one["detail"]
            click.echo(f"{one['replica']}: {one['outcome']}, {what}")
    if not answer["complete"]:
        left = [one["replica"] for one in answer["replicas"] if one["outcome"] != "reset"]
        raise Failure(f"not reset: {', '.join(left)}; try again when they are idle and reachable")


def render(answer: dict[str, Any], url: str) -> RenderableType:
    """The table of ``warmfront status``, with a verdict under it for each replica whose hit rate is low."""
    columns = ("replica", "state", "KV used / cached / all", "KiB/tok", "hits 1m", "hits", "waiting", "running")
    table = Grid(columns, "replica", left=("replica", "state"), title=f"fleet {answer['fleet']} at {url}")
    notes = []
    for replica in answer["replicas"]:
        row = (
            replica["id"],
            Text(replica["state"], style=_STYLES.get(replica["state"], "")),
            " / ".join(f"{replica[key]:,}" for key in ("kv_blocks_used", "kv_blocks_cached", "kv_blocks"))
            + _host(replica),
            f"{replica['kv_bytes_per_token'] / 1024:.1f}",
            percent(replica.get("hit_rate_1m")),
            percent(_hit_rate(replica)),
            f"{replica['waiting_tokens']:,}",
            str(replica["running"]),
        )
        table.rows.append(row)
        remarks = (replica.get("hit_rate_verdict"), replica.get("fault"), _host_hits(replica), _restarts(replica))
        notes += [Text(f"{replica['id']}: {remark}") for remark in remarks if remark]
        theirs, ours = replica.get("protocol_version", 0), answer.get("protocol_version", 0)
        if theirs < ours and not replica.get("fault"):
            notes.append(
                Text(f"{replica['id']}: speaks protocol {theirs}, this router {ours}: it is of the version before")
            )
    queue = answer.get("queue")
    if queue and queue["requests"]:
        notes.append(Text(_queue(queue), style="yellow"))
    if not answer["replicas"]:
        notes.append(Text("no replica is registered"))
    return Group(table, *notes)


def _queue(queue: dict[str, Any]) -> str:
    rate = f", drained at {queue['tokens_per_s']:,.0f} tok/s" if queue["tokens_per_s"] else ""
    return (
        f"queue: {counted(queue['requests'], 'request')} of {counted(queue['tenants'], 'tenant')} with "
        f"{counted(queue['tokens'], 'token')}, the oldest for {queue['oldest_s']:.1f} s{rate}; "
        f"{counted(queue['full_replicas'], 'replica')} full"
    )


def _hit_rate(replica: dict[str, Any]) -> float | None:
    """Since a minute after its start; None before a request came. One that is low has a verdict, from the first on."""
    rate: float | None = replica.get("hit_rate")
    return rate if rate or replica.get("hit_rate_verdict") else None


def _host(replica: dict[str, Any]) -> str:
    """What it holds in host memory, where it may."""
    num_blocks = replica.get("host_kv_blocks", 0)
    return f" + {replica['host_kv_blocks_cached']:,} / {num_blocks:,} host" if num_blocks else ""


def _host_hits(replica: dict[str, Any]) -> str:
    rate = replica.get("host_hit_rate_1h", 0)
    return f"{percent(rate)} of the last hour's prompt tokens came back from host memory" if rate else ""


def _restarts(replica: dict[str, Any]) -> str:
    times = replica.get("restarts", 0)
    return f"has ended and come back {counted(times, 'time')} since this router runs" if times else ""


def percent(share: float | None) -> str:
    """A share as people read it; "-" where there is none yet."""
    return f"{share:.0%}" if share is not None else "-"


def _find(client: Client, replica: str) -> dict[str, Any]:
    """What a router says of a replica: nothing where it knows none of that name. Raises ``Failure``."""
    return next((one for one in client.get("/v1/replicas")["replicas"] if one["id"] == replica), {})
