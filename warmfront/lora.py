"""``warmfront lora``: adapters of a running cluster. Each replica reads them from its own disk."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, urlencode

import click
from rich.text import Text

from warmfront.client import Address, Client, address_options, changed_address_options
from warmfront.console import Grid, counted, stdout
from warmfront.errors import Failure

_TIMEOUT_S = 300.0  # as long as a router waits for its replicas

_replica_option = click.option("--replica", default="", help="This one alone.  [default: every one]")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print the object that the router answers.")


@click.group()
def lora() -> None:
    """Load, unload and list LoRA adapters."""


@lora.command()
@click.argument("name")
@click.argument("path")
@_replica_option
@changed_address_options
@_json_option
def load(*, name: str, path: str, replica: str, address: Address, as_json: bool) -> None:
    """Load the adapter in the folder PATH, below each worker's --lora-dir, under NAME."""
    body = {"name": name, "path": path, "replica": replica}
    _tell(Client(address, timeout_s=_TIMEOUT_S).post("/v1/lora", body), as_json)


@lora.command()
@click.argument("name")
@_replica_option
@changed_address_options
@_json_option
def unload(*, name: str, replica: str, address: Address, as_json: bool) -> None:
    """Refuse new requests of the adapter NAME; running ones end with it, and then its memory is free."""
    query = f"?{urlencode({'replica': replica})}" if replica else ""
    _tell(Client(address, timeout_s=_TIMEOUT_S).delete(f"/v1/lora/{quote(name)}{query}"), as_json)


@lora.command("list")
@address_options
@_json_option
def list_(*, address: Address, as_json: bool) -> None:
    """List adapters with their versions, and the replicas that have them."""
    answer = Client(address, timeout_s=10).get("/v1/lora")
    if as_json:
        click.echo(json.dumps(answer))
        return
    if not answer["loras"]:
        click.echo("no adapter is loaded")
        return
    table = Grid(("adapter", "version", "rank", "replicas"), "adapter", left=("adapter", "version", "replicas"))
    for one in answer["loras"]:
        version = Text(one["version"][:12], style="" if one["served"] else "dim")
        table.rows.append((one["name"], version, str(one["rank"]), ", ".join(one["replicas"])))
    stdout.print(table)
    if others := sorted({one["name"] for one in answer["loras"] if not one["served"]}):
        click.echo(f"{', '.join(others)}: replicas hold different contents; requests get what most of them have")


def _tell(answer: dict[str, Any], as_json: bool) -> None:
    """What became of it on each replica. Raises ``Failure`` unless all have done it."""
    if as_json:
        click.echo(json.dumps(answer))
    else:
        for one in answer["replicas"]:
            running = f", {counted(one['running'], 'request')} still with it" if one["running"] else ""
            version = f" version {one['version'][:12]} rank {one['rank']}{running}" if one["version"] else ""
            detail = f": {one['detail']}" if one["detail"] else ""
            click.echo(f"{one['replica']}: {one['outcome'].replace('_', ' ')}{version}{detail}")
    if not answer["complete"]:
        done = ("loaded", "already_loaded", "unloaded", "not_loaded")
        left = [one["replica"] for one in answer["replicas"] if one["outcome"] not in done]
        raise Failure(f"not done on {', '.join(left)}" if left else "the replicas have loaded different contents")
