"""``warmfront chat``, a conversation in the terminal, and ``warmfront generate``, one answer for scripts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import Any, TextIO

import click
from rich.text import Text

from warmfront.client import Address, Answer, Client, address_options
from warmfront.console import stderr, stdout
from warmfront.errors import Failure, WrongUse
from warmfront.files import fault_of
from warmfront.values import Integer, Number

_lora_option = click.option("--lora", default=None, metavar="NAME", help="Answer with this adapter (`lora list`).")
HELP = "/new forgets the conversation, /system TEXT starts one with a system prompt, /exit (or Ctrl-D) leaves."


@click.command()
@address_options
@click.option("--system", default=None, help="System prompt.")
@click.option("--max-tokens", default=512, show_default=True, type=Integer(min=1), help="Longest answer, in tokens.")
@click.option("--temperature", default=0.7, show_default=True, type=Number(0, 2), help="0 is greedy.")
@_lora_option
def chat(*, address: Address, system: str | None, max_tokens: int, temperature: float, lora: str | None) -> None:
    """Talk to a cluster. Each answer says which replica gave it, how much of the prompt was cached, how fast it was."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and editing

    client = Client(address)
    model = served_model(client)
    if lora is not None and lora not in (loaded := _adapters(client)):
        others = f"loaded: {', '.join(loaded)}" if loaded else "none is"
        raise Failure(f"no adapter {lora!r} is loaded; {others}")
    stdout.print(Text(f"{model}{f' with {lora}' if lora else ''} at {client.url}. {HELP}", style="dim"))
    messages = _begin(system)
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            messages = _begin(system)
        elif line.startswith("/system"):
            system = line.removeprefix("/system").strip() or None
            messages = _begin(system)
        elif line.startswith("/"):
            stdout.print(Text(HELP, style="dim"))
        elif line:
            body = {"model": model, "messages": [*messages, _message("user", line)], "max_tokens": max_tokens}
            answer = _answer(client, {**body, "temperature": temperature, **_adapter(lora)})
            if answer is not None:
                messages += [_message("user", line), _message("assistant", answer.text)]


@click.command()
@click.argument("prompt", required=False)
@address_options
@click.option("--prompt-file", type=click.File("r", encoding="utf-8"), help="The prompt; - for standard input.")
@click.option("--max-tokens", default=256, show_default=True, type=Integer(min=1), help="Longest answer, in tokens.")
@click.option("--temperature", default=0.0, show_default=True, type=Number(0, 2), help="0 is greedy.")
@click.option("--seed", default=None, type=Integer(min=0), help="Equal seeds give equal draws.")
@_lora_option
@click.option("--chat", "as_chat", is_flag=True, help="Send the prompt as a user's message instead of as it stands.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
def generate(
    *,
    prompt: str | None,
    address: Address,
    prompt_file: TextIO | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    lora: str | None,
    as_chat: bool,
    as_json: bool,
) -> None:
    """Answer PROMPT or that of --prompt-file: the text goes to standard output and nothing else does."""
    if (prompt is None) == (prompt_file is None):
        raise WrongUse("give a PROMPT or --prompt-file (- for standard input), one of them")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUse(f"--prompt-file: {fault_of(error)}") from error
    if not prompt:
        raise WrongUse("the prompt is empty" if prompt_file is None else "--prompt-file is empty")
    client = Client(address)
    body: dict[str, Any] = {"model": served_model(client), "max_tokens": max_tokens, "temperature": temperature}
    body |= _adapter(lora)
    if seed is not None:
        body["seed"] = seed
    if as_chat:
        path, body["messages"] = "/v1/chat/completions", [_message("user", prompt)]
    else:
        path, body["prompt"] = "/v1/completions", prompt
    answer = client.generate(path, body, on_text=(lambda text: None) if as_json else _write)
    click.echo(json.dumps(summary(answer)) if as_json else "")


def served_model(client: Client) -> str:
    """The name of the model that a cluster serves."""
    models = client.get("/v1/models")["data"]
    if not models:
        raise Failure(f"{client.url} serves no model yet: no replica is ready")
    name: str = models[0]["id"]
    return name


def _adapters(client: Client) -> list[str]:
    """The names of those that requests may ask for."""
    return [one["id"] for one in client.get("/v1/models")["data"][1:]]


def summary(answer: Answer) -> dict[str, Any]:
    """An answer as one JSON object."""
    rate = answer.tokens_per_s
    return {
        **dataclasses.asdict(answer),
        "ttft_s": round(answer.ttft_s, 4),
        "total_s": round(answer.total_s, 4),
        "tokens_per_s": round(rate, 1) if rate is not None else None,
    }


def cost_line(answer: Answer) -> str:
    """What an answer cost, in one line."""
    rate = f"{answer.tokens_per_s:.0f} tok/s" if answer.tokens_per_s is not None else "1 token"
    replica, cached = answer.replica or "replica unknown", f"{answer.cached_tokens} / {answer.prompt_tokens}"
    return f"{replica} · {cached} prompt tokens cached · TTFT {answer.ttft_s * 1000:.0f} ms · {rate}"


def _answer(client: Client, body: dict[str, Any]) -> Answer | None:
    """Prints an answer as it comes. None when it was interrupted or failed: the conversation goes on without it."""
    try:
        answer = client.generate("/v1/chat/completions", body, on_text=_write)
    except KeyboardInterrupt:
        stdout.print(Text("\n(interrupted)", style="dim"))
        return None
    except Failure as error:
        stderr.print(Text(f"\nwarmfront: {error.format_message()}"))
        return None
    stdout.print(Text(f"\n{cost_line(answer)}", style="dim"))
    return answer


def _begin(system: str | None) -> list[dict[str, str]]:
    return [_message("system", system)] if system else []


def _adapter(name: str | None) -> dict[str, str]:
    return {"lora": name} if name is not None else {}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
