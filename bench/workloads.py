"""What prefix caching gives on eight shapes of load: prefill saved, TTFT with the cache off and on, requests that hit.

    python -P bench/workloads.py [--scale 1.0] [--only TEXT] [--svg FILE] [--threads 2] [--clock wall|cpu]
                                 [--count-only]

The real engine on the packaged SmolLM2 in bfloat16, one request at a time, as a single user would see it. Two engines,
one with caching and one without, take turns request by request, so that noise hits both. Nothing is warm at first: the
first request of each load is cold and is counted. Token ids are made up, but a conversation goes on from what the
model really answered. ``--scale`` multiplies all lengths. On a machine that others use, ``--threads 1 --clock cpu``
counts processor time. With ``--count-only`` no model runs: what is saved is the same, and there are no times. One JSON
line per load and a table at the end.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch

sys.path.append(str(Path(__file__).parent / "lib"))  # not first: bench/cache.py is no package of ours
from serving import BLOCK_SIZE, Server, made_up

from worker.detokenizer import TokenTable
from worker.loading import default_model_path, load_model
from worker.loading.tokenizer import load_tokenizer
from worker.model_runner import ModelRunner

OUTPUT_TOKENS = 16
Prompts = Iterator[tuple[list[int], Callable[[list[int]], None]]]
"""Prompts, each with whom to tell what was answered."""


class Source:
    """Texts of so many tokens, each unlike all others."""

    def __init__(self, scale: float) -> None:
        self._scale, self._number = scale, 0
        self.random = random.Random(7)

    def text(self, length: int) -> list[int]:
        self._number += 1
        return made_up(max(1, round(length * self._scale)), self._number)


def forget(answer: list[int]) -> None:
    pass


def static_rag(source: Source) -> Prompts:
    """One context of 4,096 tokens for everybody, a question of 64."""
    context = source.text(4096)
    for _ in range(12):
        yield context + source.text(64), forget


def rotating_rag(source: Source) -> Prompts:
    """Instructions of 256 tokens, 4 of 12 chunks of 512 in whatever order they were found, a question of 64."""
    instructions, chunks = source.text(256), [source.text(512) for _ in range(12)]
    for _ in range(16):
        found = source.random.sample(chunks, 4)
        yield instructions + [token for chunk in found for token in chunk] + source.text(64), forget


def chat(source: Source) -> Prompts:
    """Four conversations of 6 turns side by side: a system prompt of 256 tokens, 100 more from the user each turn."""
    system = source.text(256)
    histories = [list(system) for _ in range(4)]
    for _ in range(6):
        for history in histories:
            history += source.text(100)
            yield list(history), history.extend


def agent(source: Source) -> Prompts:
    """Two tasks of 8 steps: 1,024 tokens of instructions and tools, then what each tool gave, 200 tokens."""
    tools = source.text(1024)
    for _ in range(2):
        history = tools + source.text(64)
        for _ in range(8):
            yield list(history), history.extend
            history += source.text(200)


def long_documents(source: Source) -> Prompts:
    """Three documents of 3,072 tokens, 5 questions of 48 about each."""
    for _ in range(3):
        document = source.text(3072)
        for _ in range(5):
            yield document + source.text(48), forget


def open_ended(source: Source) -> Prompts:
    """Questions of 32 to 256 tokens that have nothing in common."""
    for _ in range(24):
        yield source.text(source.random.randint(32, 256)), forget


def insertions(source: Source) -> Prompts:
    """One document of 2,048 tokens and a question of 48; every second prompt has 24 tokens inserted in the middle."""
    document = source.text(2048)
    middle = len(document) // 2
    for number in range(12):
        inserted = source.text(24) if number % 2 else []
        yield document[:middle] + inserted + document[middle:] + source.text(48), forget


def one_shot(source: Source) -> Prompts:
    """Prompts of 1,024 tokens that have nothing in common."""
    for _ in range(8):
        yield source.text(1024), forget


LOADS = {
    "RAG, static context": static_rag,
    "RAG, rotating chunks": rotating_rag,
    "multi-turn chat": chat,
    "agent loop": agent,
    "questions on long documents": long_documents,
    "open-ended questions": open_ended,
    "insertion in the middle": insertions,
    "one-shot": one_shot,
}


@dataclass(slots=True)
class Outcome:
    """Sums over one load."""

    ttfts_s: dict[bool, list[float]]
    prompt_tokens: int = 0
    computed: int = 0
    hits: int = 0

    def figures(self, timed: bool) -> dict[str, float]:
        off, on = mean(self.ttfts_s[False]), mean(self.ttfts_s[True])
        counts = {
            "requests": len(self.ttfts_s[True]),
            "mean_prompt_tokens": round(self.prompt_tokens / len(self.ttfts_s[True])),
            "prefill_saved": round(1 - self.computed / self.prompt_tokens, 4),
            "requests_that_hit": round(self.hits / len(self.ttfts_s[True]), 4),
        }
        times = {
            "ttft_off_ms": round(off * 1e3, 1),
            "ttft_on_ms": round(on * 1e3, 1),
            "ttft_saved": round(1 - on / off, 4),
        }
        return counts | times if timed else counts


async def run(load: Callable[[Source], Prompts], servers: dict[bool, Server], scale: float) -> Outcome:
    outcome = Outcome({True: [], False: []})
    for prompt, answered in load(Source(scale)):
        first = len(outcome.ttfts_s[True]) % 2 == 0
        for reuse in (first, not first):
            served = await servers[reuse].answer([prompt], OUTPUT_TOKENS)
            outcome.ttfts_s[reuse].append(served.ttft_s)
            if reuse:
                outcome.prompt_tokens += served.prompt_tokens
                outcome.computed += served.computed_prompt_tokens
                outcome.hits += served.num_cached[0] > 0
                answer = served.outputs[0]
        answered(answer)
    return outcome


async def run_all(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    path, device = default_model_path(), torch.device("cpu")
    table = TokenTable.from_tokenizer_json(load_tokenizer(path).tokenizer_json)
    pools = {False: 400, True: 2000}  # blocks
    models: dict[bool, ModelRunner | None] = {False: None, True: None}
    if not options.count_only:
        for reuse, blocks in pools.items():
            loaded = load_model(path, dtype="bfloat16", device=device)
            models[reuse] = ModelRunner(loaded, num_blocks=blocks, block_size=BLOCK_SIZE)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    found = {}
    for name, load in LOADS.items():
        if options.only not in name:
            continue
        servers = {
            reuse: Server(model, table, num_blocks=pools[reuse], reuse=reuse, clock=clock)
            for reuse, model in models.items()
        }
        try:
            await servers[True].answer([made_up(40, 90_000)], 4)  # the first step of a process is slow
            await servers[False].answer([made_up(40, 90_000)], 4)
            found[name] = (await run(load, servers, options.scale)).figures(timed=not options.count_only)
        finally:
            for server in servers.values():
                server.stop()
        print(json.dumps({"load": name} | found[name]), flush=True)
    return found


def markdown(found: dict[str, dict[str, float]]) -> str:
    timed = all("ttft_saved" in one for one in found.values())
    names = ["load", "requests x mean prompt", "prefill saved", "requests that hit"]
    lines = [names + ["TTFT off / on", "TTFT saved"] * timed]
    lines.append(["---"] * len(lines[0]))
    for name, one in found.items():
        cells = [name, f"{one['requests']} x {one['mean_prompt_tokens']:,}"]
        cells += [f"{one['prefill_saved']:.0%}", f"{one['requests_that_hit']:.0%}"]
        if timed:
            cells += [f"{one['ttft_off_ms']:.0f} / {one['ttft_on_ms']:.0f} ms", f"{one['ttft_saved']:.0%}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def svg(found: dict[str, dict[str, float]]) -> str:
    """Two bars per load: prefill saved and TTFT saved, 0 to 100 %."""
    left, width, row = 230, 520, 44
    height = row * len(found) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 70} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for percent in range(0, 101, 25):
        x = left + width * percent / 100
        parts.append(f'<line x1="{x}" y1="10" x2="{x}" y2="{height - 36}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{height - 22}" text-anchor="middle" fill="#666">{percent} %</text>')
    for number, (name, one) in enumerate(found.items()):
        top = 14 + row * number
        parts.append(f'<text x="{left - 10}" y="{top + 20}" text-anchor="end">{name}</text>')
        for offset, key, colour in ((0, "prefill_saved", "#0a7"), (16, "ttft_saved", "#38c")):
            if key not in one:
                continue
            share = max(0.0, one[key])
            parts.append(
                f'<rect x="{left}" y="{top + offset}" width="{width * share:.1f}" height="14" fill="{colour}"/>'
                f'<text x="{left + width * share + 6:.1f}" y="{top + offset + 12}">{one[key]:.0%}</text>'
            )
    parts.append(f'<text x="{left}" y="{height - 4}" fill="#0a7">prefill saved</text>')
    parts.append(f'<text x="{left + 110}" y="{height - 4}" fill="#38c">time to first token saved</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="all lengths times this")
    parser.add_argument("--only", default="", help="loads whose name has this in it")
    parser.add_argument("--svg", type=Path, help="draw the savings there")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--count-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = asyncio.run(run_all(options))
    print(markdown(found))
    if options.svg is not None:
        options.svg.write_text(svg(found), encoding="utf-8")


if __name__ == "__main__":
    main()
