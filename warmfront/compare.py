"""``warmfront compare``: the same prompts cold, warm and without a cache, side by side.

Cold is the first time that a cluster sees a prompt: each gets a ``cache_salt`` nobody has used before. Warm is the same
request again. For the third column a cluster of one worker with ``--no-enable-prefix-caching`` is started with the same
model and settings, and ends with the command.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Group, RenderableType
from rich.text import Text

from warmfront.chat import served_model, summary
from warmfront.client import Address, Answer, Client, address_options
from warmfront.console import Grid, Progress, stdout
from warmfront.errors import Failure, WrongUse
from warmfront.files import fault_of, read_text
from warmfront.processes import child_environment, last_line
from warmfront.run_dir import all_run_dirs, write_private
from warmfront.store import die_with_parent
from warmfront.values import FILE, THERE, Integer

_SHOWN_CHARS = 24  # of a prompt, in its row
COLUMNS = ("cold", "warm", "no cache")


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt's answers."""

    prompt: str  # its beginning, for people
    answers: dict[str, Answer]  # by column

    @property
    def texts_equal(self) -> bool:
        """Whether all answers say the same."""
        return len({answer.text for answer in self.answers.values()}) == 1


@click.command()
@click.argument("file", required=False, type=THERE)
@address_options
@click.option("--max-tokens", default=24, show_default=True, type=Integer(min=1), help="Length of each answer.")
@click.option(
    "--model",
    default=None,
    type=FILE,
    help="For the worker without a cache, where the cluster runs elsewhere.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt.")
def compare(*, file: Path | None, address: Address, max_tokens: int, model: Path | None, as_json: bool) -> None:
    """Send the prompts of FILE cold, warm and to a worker without a cache; show TTFT, tokens computed, equal texts.

    FILE has one prompt per line, or prompts with blank lines between, or JSON lines: a string, {"prompt": ...} or
    {"messages": [...]}. Without FILE: questions about a sample document.
    """
    bodies = [{**body, "max_tokens": max_tokens, "temperature": 0} for body in read_prompts(file)]
    client = Client(address)
    settings = _settings_of(client.url, model)
    rows = [Row(_first_words(body), {}) for body in bodies]
    with Progress() as progress:
        name = served_model(client)
        salts = [secrets.token_hex(8) for _ in bodies]
        for column in ("cold", "warm"):
            for number, (row, body, salt) in enumerate(zip(rows, bodies, salts, strict=True), start=1):
                progress.update(f"{column}: prompt {number} of {len(rows)}")
                row.answers[column] = _ask(client, name, {**body, "cache_salt": salt})
        progress.update("starting a worker without a cache")
        with uncached_cluster(settings) as other:
            other_name = served_model(other)
            for number, (row, body) in enumerate(zip(rows, bodies, strict=True), start=1):
                progress.update(f"no cache: prompt {number} of {len(rows)}")
                row.answers["no cache"] = _ask(other, other_name, body)
    if as_json:
        for row in rows:
            answers = {column.replace(" ", "_"): summary(answer) for column, answer in row.answers.items()}
            click.echo(json.dumps({"prompt": row.prompt, "texts_equal": row.texts_equal, **answers}))
    else:
        stdout.print(render(rows))


def read_prompts(file: Path | None) -> list[dict[str, Any]]:
    """The request bodies that a file asks for. Raises ``WrongUse`` naming the line at fault."""
    if file is None:
        text = (importlib.resources.files("warmfront") / "samples" / "compare.jsonl").read_text(encoding="utf-8")
    else:
        text = read_text(file, str(file))
    if not text.strip():
        raise WrongUse(f"{file} holds no prompt")
    if text.lstrip()[0] in '{"':
        with contextlib.suppress(json.JSONDecodeError):
            json.loads(text.lstrip().splitlines()[0])
            return [
                _body(line, f"{file or 'sample'}, line {number}")
                for number, line in enumerate(text.splitlines(), 1)
                if line.strip()
            ]
    blocks = text.split("\n\n") if "\n\n" in text.strip() else text.splitlines()
    return [{"prompt": block.strip("\n")} for block in blocks if block.strip()]


def render(rows: Sequence[Row]) -> RenderableType:
    """The table, and one line that says what it shows."""
    columns = ("prompt", "tokens", "TTFT ms", "tokens computed", "texts")
    table = Grid(columns, "prompt", left=("prompt", "texts"), title=" / ".join(COLUMNS))
    for row in rows:
        answers = [row.answers[column] for column in COLUMNS]
        prompt = Text(row.prompt)
        prompt.truncate(_SHOWN_CHARS, overflow="ellipsis")
        cells = (
            prompt,
            f"{answers[0].prompt_tokens:,}",
            " / ".join(f"{answer.ttft_s * 1000:,.0f}" for answer in answers),
            " / ".join(f"{answer.computed_tokens:,}" for answer in answers),
            Text("equal") if row.texts_equal else Text("differ", style="yellow"),
        )
        table.rows.append(cells)
    return Group(table, Text(""), Text(verdict(rows)))


def verdict(rows: Sequence[Row]) -> str:
    """What the table shows, in one or two sentences."""
    total = {column: sum(row.answers[column].computed_tokens for row in rows) for column in COLUMNS}
    ttft = {column: sum(row.answers[column].ttft_s for row in rows) for column in COLUMNS}
    equal = sum(row.texts_equal for row in rows)
    text = (
        f"Warm computed {total['warm']:,} of {total['no cache']:,} prompt tokens "
        f"({total['warm'] / max(total['no cache'], 1):.1%}) and took {ttft['warm'] / ttft['cold']:.2f} of the cold "
        f"TTFT; {equal} of {len(rows)} texts are equal in all three."
    )
    if equal < len(rows):
        text += (
            " In mode fast a different order of sums can tip a near tie; --mode deterministic on `up` rules that out."
        )
    return text


@contextlib.contextmanager
def uncached_cluster(settings: dict[str, Any]) -> Iterator[Client]:
    """A cluster of one worker that keeps nothing, for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="wf-compare-") as folder:
        config, ready, log = (Path(folder) / name for name in ("up.yaml", "ready.json", "up.log"))
        own = {"replicas": 1, "routers": 1, "http_port": 0, "grpc_port": 0, "metrics_port": None, "listen": "127.0.0.1"}
        own |= {"fleet": "compare", "without_ray": True, "enable_prefix_caching": False, "ready_file": str(ready)}
        write_private(config, yaml.safe_dump({**settings, **own}))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "warmfront", "up", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise Failure(f"the worker without a cache does not start: {last_line(log)}")
                time.sleep(0.1)
            yield Client(json.loads(ready.read_text(encoding="utf-8"))["http"])
        finally:
            process.terminate()
            process.wait()


def _ask(client: Client, model: str, body: dict[str, Any]) -> Answer:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return client.generate(path, {**body, "model": model})


def _settings_of(url: str, model: Path | None) -> dict[str, Any]:
    """The flags of the workers behind ``url``, where that is a cluster of this machine."""
    for run_dir in all_run_dirs():
        if run_dir.cluster.get("http") == url and run_dir.owner():
            settings: dict[str, Any] = run_dir.cluster["worker"]
            return settings if model is None else {**settings, "model": str(model.absolute())}
    if model is None:
        raise WrongUse(
            f"{url} is not a cluster of this machine: say with --model what the worker without a cache shall load"
        )
    return {"model": str(model.absolute())}


def _body(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise WrongUse(f"{where}: {fault_of(error)}") from error
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return {"prompt": value["prompt"]}
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return {"messages": value["messages"]}
    raise WrongUse(f'{where}: expected a string, {{"prompt": ...}} or {{"messages": [...]}}')


def _first_words(body: dict[str, Any]) -> str:
    text = body.get("prompt") or body["messages"][-1].get("content", "")
    return " ".join(str(text).split())[:60]
