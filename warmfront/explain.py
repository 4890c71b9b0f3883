"""``warmfront explain``: why requests went where they went, or where a prompt would go now."""

from __future__ import annotations

import json
import time
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from warmfront.client import Address, Client, address_options
from warmfront.console import Grid, counted, stdout
from warmfront.errors import WrongUse
from warmfront.values import Integer

# Routers know whole blocks. A replica may also reuse tokens inside the block that follows them.
REASONS = {
    "warmest": "none that could be chosen holds more blocks of the prompt",
    "cheaper": "another replica holds more blocks of the prompt, but would answer later or delay others more",
    "cold": "none that could be chosen holds a whole block of the prompt",
    "below_block": "the prompt is no longer than a block, and a router knows only of whole ones",
    "no_reuse": "nothing is cached of such requests",
    "no_replica": "no replica takes requests",
}


@click.command()
@click.argument("prompt", required=False)
@address_options
@click.option("--request-id", help="The request to explain: x-request-id of its answer.")
@click.option("--last", type=Integer(1), help="List so many of the newest decisions.  [default: 20]")
@click.option("--chat/--completion", "as_chat", default=True, help="PROMPT is a user's message, or plain text.")
@click.option("--json", "as_json", is_flag=True, help="Print the object of POST /v1/explain.")
def explain(
    *, prompt: str | None, address: Address, request_id: str | None, last: int | None, as_chat: bool, as_json: bool
) -> None:
    """Show what each replica held and would have cost when a request was placed.

    With PROMPT: where that would go now; it is not sent. With --request-id: one request of the past. Else a list of
    the newest decisions. A router remembers its own last 256, without their prompts.
    """
    if sum(one is not None for one in (prompt, request_id, last)) > 1:
        raise WrongUse("give a PROMPT, --request-id or --last, not two of them")
    body: dict[str, Any] = {"last": last or 20}
    if request_id is not None:
        body = {"request_id": request_id}
    elif prompt is not None:
        body = {"messages": [{"role": "user", "content": prompt}]} if as_chat else {"prompt": prompt}
    answer = Client(address, timeout_s=10).post("/v1/explain", body)
    if as_json:
        click.echo(json.dumps(answer))
    elif "explanations" in answer:
        stdout.print(decisions_table(answer["explanations"]))
    else:
        stdout.print(decision_table(answer))


def decisions_table(explanations: list[dict[str, Any]]) -> RenderableType:
    """One line per decision, newest first."""
    if not explanations:
        return Text("this router has placed no request yet")
    columns = ("at", "request", "prompt", "matched", "cached", "TTFT ms", "replica", "why")
    table = Grid(columns, "request", left=("at", "request", "replica", "why"))
    for one in explanations:
        chosen: dict[str, Any] = next((r for r in one["replicas"] if r["replica"] == one["chosen"]), {})
        row = (
            time.strftime("%H:%M:%S", time.localtime(one["decided_at_s"])),
            one["request_id"],
            f"{one['prompt_tokens']:,}",
            f"{chosen.get('matched_tokens', 0):,}",
            f"{one['cached_tokens']:,}" if "cached_tokens" in one else "-",
            _ms(one["ttft_s"]) if "ttft_s" in one else "-",
            one["chosen"] or "-",
            one["reason"],
        )
        table.rows.append(row)
    return table


def decision_table(one: dict[str, Any]) -> RenderableType:
    """One decision: every replica with what it held, what waited there and the terms of its cost."""
    where = f"to {one['chosen']}" if one["chosen"] else "nowhere"
    title = (
        f"{one['request_id'] or 'a request like this'}: {counted(one['prompt_tokens'], 'token')}, "
        f"{counted(one['full_blocks'], 'block')} of {one['block_size']}, {where} by {one['policy']}: "
        f"{REASONS.get(one['reason'], one['reason'])}"
    )
    blocks, costs = (
        ("device", "host", "pending", "waiting tok"),
        ("TTFT ms", "wait", "miss", "delayed", "displaced", "cost ms"),
    )
    table = Grid(("replica", "why", *blocks, *costs), "replica", left=("replica", "why"))
    notes = []
    for replica in one["replicas"]:
        names = ("device_blocks", "host_blocks", "pending_blocks", "waiting_tokens")
        times = ("predicted_ttft_s", "wait_s", "miss_s", "delayed_s", "displaced_s", "cost_s")
        why = Text(replica["reason"], style="green" if replica["reason"] == "chosen" else "")
        numbers = (*(f"{replica[name]:,.0f}" for name in names), *(_ms(replica.get(name, 0)) for name in times))
        table.rows.append((replica["replica"], why, *numbers))
        if replica["detail"]:
            notes.append(Text(f"{replica['replica']}: {replica['detail']}"))
    if one.get("cache"):
        notes.append(Text(f"{one['chosen']}'s cache: {cache_text(one['cache'])}"))
    if "cached_tokens" in one:
        after = f" after {_ms(one['ttft_s'])} ms" if "ttft_s" in one else ""
        inside = ", some of them inside a block" if one["cached_tokens"] % one["block_size"] else ""
        held = counted(one["cached_tokens"], "token")
        notes.append(Text(f"{one['chosen']} answered{after} with {held} from its cache{inside}"))
    if one.get("queue_s"):
        notes.append(Text(f"held back in the router's queue for {_ms(one['queue_s'])} ms"))
    return Group(Text(title, style="bold"), table, *notes)


def cache_text(cache: dict[str, Any]) -> str:
    """What a replica says of a prompt's blocks, in a sentence."""
    held = f"{counted(cache['cached_tokens'], 'token')} held in whole blocks"
    if cache["coming_tokens"]:
        held += f", {cache['coming_tokens']:,} more being computed"
    match cache["reason"]:
        case "hit":
            return f"{held}, all of those that can be reused"
        case "below_block":
            return "the prompt is no longer than a block; only tokens inside one can be reused"
        case "never_seen":
            return f"{held}; it does not remember to have had the next block"
        case "evicted":
            whom = f" to make room for request {cache['evicted_for']}" if cache["evicted_for"] else ""
            return (
                f"{held}; the next block was {cache['removal_reason']} {cache['evicted_ago_s']:,.1f} s ago{whom}, "
                f"after {cache['idle_s']:,.1f} s without use"
            )
        case _:
            return f"{held}; what became of the next block is not known any more"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
