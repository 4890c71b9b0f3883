"""The engine's own speed on this machine, beside transformers, vLLM and the physical floors, in one run.

    python -P bench/engine.py [--threads 2] [--repeats 5] [--quick] [--clock wall|cpu] [--no-cpu-kernel]
                              [--peer vllm-python=/path/to/python] [--only TEXT]

Prints one JSON line per figure. A figure is the best of several rounds, in which all take turns, so that noise on a
shared machine hits everyone; ``ratio`` is ours / transformers, ``ratio_vllm`` ours / vLLM, for times and for tokens per
second alike. On a machine that others load too, ``--threads 1 --clock cpu`` counts processor time and still compares
ours and transformers fairly. Everything is bfloat16, mode fast, on the packaged SmolLM2.

vLLM needs a virtual environment of its own (docs/engine.md); where ``--peer`` is absent its column is too.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import worker  # noqa: F401 - sets how idle threads wait, before torch starts any
from worker.batch import SamplingParams, SequenceSlice, StepBatch
from worker.loading import LoadedModel, default_model_path, load_model
from worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0)
BLOCK_SIZE = 16
CHUNK_TOKENS = 2048
WARM_TOKENS = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64


clock: Callable[[], float] = time.perf_counter


class Ours:
    """The runner, driven as the scheduler drives it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def prefill(self, prompt: Sequence[int], num_cached: int = 0, chunk_tokens: int = CHUNK_TOKENS) -> float:
        """Seconds to the first token of ``prompt``, its first ``num_cached`` tokens warm."""
        begin = clock()
        blocks = range(1, 2 + len(prompt) // BLOCK_SIZE)
        for start in range(num_cached, len(prompt), chunk_tokens):
            chunk = prompt[start : start + chunk_tokens]
            sampling = GREEDY if start + len(chunk) == len(prompt) else None
            self._step([self._slice(chunk, start, blocks, sampling)])
        return clock() - begin

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds for ``num_tokens`` steps of all ``prompts`` together, prefill not counted."""
        per_prompt = -(-(len(prompts[0]) + num_tokens) // BLOCK_SIZE)
        tables = [range(1 + index * per_prompt, 1 + (index + 1) * per_prompt) for index in range(len(prompts))]
        tokens = self._step(
            [self._slice(prompt, 0, table, GREEDY) for prompt, table in zip(prompts, tables, strict=True)]
        )
        begin = clock()
        for position in range(len(prompts[0]), len(prompts[0]) + num_tokens):
            rows = [self._slice([token], position, table, GREEDY) for token, table in zip(tokens, tables, strict=True)]
            tokens = self._step(rows)
        return clock() - begin

    def _step(self, slices: list[SequenceSlice]) -> list[Any]:
        return [result.token_id for result in self._runner.execute(StepBatch(slices=slices))]

    @staticmethod
    def _slice(
        token_ids: Sequence[int], start: int, blocks: Sequence[int], sampling: SamplingParams | None
    ) -> SequenceSlice:
        return SequenceSlice(request_id="", token_ids=token_ids, start=start, block_ids=blocks, sampling=sampling)


class Theirs:
    """transformers with its default attention (SDPA) and a dynamic cache."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = LlamaForCausalLM(llama_config(loaded)).to(loaded.dtype).eval()
        self._model.load_state_dict(loaded.weights, strict=False)
        self._model.tie_weights()
        self._warm: dict[int, DynamicCache] = {}

    def prefill(self, prompt: Sequence[int], num_cached: int = 0) -> float:
        cache = self._cache_of(prompt, num_cached) if num_cached else DynamicCache()
        begin = clock()
        int(self._forward([prompt[num_cached:]], cache)[0])
        took = clock() - begin
        if num_cached:
            cache.crop(-len(prompt) + num_cached)  # negative: so many tokens off the end
        return took

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        cache = DynamicCache()
        tokens = self._forward(prompts, cache)
        begin = clock()
        for _ in range(num_tokens):
            tokens = self._forward(tokens[:, None].tolist(), cache)
        return clock() - begin

    def _cache_of(self, prompt: Sequence[int], num_cached: int) -> DynamicCache:
        if num_cached not in self._warm:
            self._warm[num_cached] = DynamicCache()
            self._forward([prompt[:num_cached]], self._warm[num_cached])
        return self._warm[num_cached]

    @torch.inference_mode()
    def _forward(self, token_ids: Sequence[Sequence[int]], cache: DynamicCache) -> Tensor:
        out = self._model(torch.tensor(token_ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(dim=-1)


class Vllm:
    """vLLM in a process of its own, told what to do line by line; see bench/peers/vllm_cpu.py."""

    def __init__(self, python: str, loaded: LoadedModel, threads: int, eager: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warmfront-bench-")
        folder = Path(self._folder.name)
        llama_config(loaded).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "rope_theta": loaded.config.rope.theta, "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: one.contiguous() for name, one in loaded.weights.items()}, folder / "model.safetensors")
        script = Path(__file__).parent / "peers" / "vllm_cpu.py"
        command = [python, str(script), str(folder), "--threads", str(threads), *(["--eager"] if eager else [])]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
        )
        self.name = self._answer()["ready"]
        self._tail = 0

    def prefill(self, prompt: Sequence[int], num_cached: int = 0) -> float:
        """Its cache is emptied for a cold one; the tail of a warm one is new each time."""
        if not num_cached:
            return self._run([prompt], 1, reset=True)
        self._run([prompt[:num_cached]], 1)  # warms it, or finds it warm
        self._tail += 1
        return self._run(
            [[*prompt[:num_cached], *((self._tail + 7 * index) % 40_000 for index in range(WARM_TOKENS))]], 1
        )

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Prompts of one block are never cached, so both runs begin with the same prefill."""
        return self._run(prompts, num_tokens + 1, reset=True) - self._run(prompts, 1, reset=True)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    def _run(self, prompts: Sequence[Sequence[int]], num_tokens: int, reset: bool = False) -> float:
        assert self._process.stdin is not None
        work = {"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens, "reset": reset}
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        seconds = float(self._answer()["seconds"])
        time.sleep(0.5)  # until its idle threads have stopped spinning: the cores are the next one's
        return seconds

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with {self._process.wait()}; what it said stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def llama_config(loaded: LoadedModel) -> LlamaConfig:
    config = loaded.config
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_context,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


class NoAttention:
    """What a step costs when attention is free."""

    name = "none"

    def plan(self, spans: Any, num_rows: int) -> None:
        return None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, plan: None) -> Tensor:
        return queries.flatten(1)


def seconds(work: Callable[[], Any]) -> float:
    begin = clock()
    work()
    return clock() - begin


def rounds_of(works: Sequence[Callable[[], float]], repeats: int) -> list[tuple[float, ...]]:
    """Seconds of each of ``works`` per round, in which they take turns; one round before is not counted."""
    rounds = [[work() for work in works] for _ in range(repeats + 1)]
    return list(zip(*rounds[1:], strict=True))


def best(works: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    return [min(times) for times in rounds_of(works, repeats)]


def emit(figure: str, unit: str, **values: float) -> None:
    print(
        json.dumps({"figure": figure, "unit": unit, **{name: round(value, 4) for name, value in values.items()}}),
        flush=True,
    )


def floors(repeats: int) -> None:
    size = 2048
    a, b = torch.randn(size, size).bfloat16(), torch.randn(size, size).bfloat16()
    (took,) = best([lambda: seconds(lambda: a @ b)], repeats)
    emit("floor: bf16 matmul 2048", "GFLOP/s", value=2 * size**3 / took / 1e9)
    big = torch.ones(64 * 2**20)
    (took,) = best([lambda: seconds(lambda: big.sum())], repeats)
    emit("floor: memory read", "GB/s", value=big.numel() * 4 / took / 1e9)


class Table:
    """Figures of ours beside every peer."""

    def __init__(self, ours: Ours, theirs: Theirs, vllm: Vllm | None, only: str) -> None:
        self._peers: dict[str, Any] = {"ours": ours, "transformers": theirs} | ({"vllm": vllm} if vllm else {})
        self._only = only

    def times(self, figure: str, work: Callable[[Any], float], repeats: int) -> None:
        """Milliseconds of ``work``."""
        self._compare(figure, "ms", work, repeats, lambda seconds: seconds * 1e3)

    def rates(self, figure: str, work: Callable[[Any], float], repeats: int, count: int) -> None:
        """``count`` per second of ``work``."""
        self._compare(figure, "tokens/s", work, repeats, lambda seconds: count / seconds)

    def _compare(
        self, figure: str, unit: str, work: Callable[[Any], float], repeats: int, of: Callable[[float], float]
    ) -> None:
        if self._only not in figure:
            return
        bests = best([lambda peer=peer: work(peer) for peer in self._peers.values()], repeats)  # type: ignore[misc]
        values = {name: of(seconds) for name, seconds in zip(self._peers, bests, strict=True)}
        values["ratio"] = values["ours"] / values["transformers"]
        if "vllm" in values:
            values["ratio_vllm"] = values["ours"] / values["vllm"]
        emit(figure, unit, **values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the short prompts and small batches only")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--no-cpu-kernel", action="store_true", help="torch's operators, even where ours is built")
    parser.add_argument("--peer", help="vllm-python=PATH: the Python of an environment with vllm-cpu")
    parser.add_argument("--peer-eager", action="store_true", help="do not let the peer compile: minutes sooner, slower")
    parser.add_argument("--only", default="", help="figures whose name has this in it")
    options = parser.parse_args()
    kind, _, python = (options.peer or "").partition("=")
    if options.peer and (kind != "vllm-python" or not Path(python).exists()):
        parser.error("--peer is vllm-python=PATH of a Python")
    if options.peer and options.clock == "cpu":
        parser.error("the peer's time is wall time: --clock cpu cannot be compared with it")
    if options.clock == "cpu":
        global clock
        clock = time.process_time
    torch.set_num_threads(options.threads)
    path, device = default_model_path(), torch.device("cpu")
    loaded = load_model(path, dtype="bfloat16", device=device)
    theirs = Theirs(loaded)
    vllm = Vllm(python, loaded, options.threads, options.peer_eager) if options.peer else None
    runner = ModelRunner(loaded, num_blocks=600, block_size=BLOCK_SIZE, cpu_kernel=not options.no_cpu_kernel)
    ours = Ours(runner)
    setting = {"threads": options.threads, "repeats": options.repeats, "clock": options.clock}
    peers = {"vllm": (vllm.name + " eager" * options.peer_eager) if vllm else "not asked for (--peer)"}
    print(
        json.dumps({"figure": "setting", "attention": runner.attention, "torch": torch.__version__} | setting | peers)
    )
    floors(options.repeats)
    table = Table(ours, theirs, vllm, options.only)
    prompt = [(index * index * 31 + 17 * index + 3) % 49000 for index in range(4096)]

    for length in (512,) if options.quick else (512, 2048, 4096):
        cold, repeats = prompt[:length], max(2, options.repeats * 512 // length)
        table.times(f"TTFT cold {length}", lambda peer: peer.prefill(cold), repeats)  # noqa: B023
    for length in (512,) if options.quick else (512, 2048, 4096):
        warm = prompt[:length]
        ours.prefill(warm)
        work = lambda peer: peer.prefill(warm, len(warm) - WARM_TOKENS)  # noqa: B023, E731
        table.times(f"TTFT warm {length}", work, options.repeats)
    for size in (1, 8) if options.quick else (1, 8, 32):
        prompts = [prompt[index * 7 : index * 7 + PROMPT_TOKENS] for index in range(size)]
        work = lambda peer: peer.decode(prompts, OUTPUT_TOKENS)  # noqa: B023, E731
        table.rates(f"decode batch {size}", work, max(2, options.repeats // 2), size * OUTPUT_TOKENS)
    if vllm:
        vllm.close()
    if options.only:
        return

    length, works = 2048, [lambda: ours.prefill(prompt[:2048], chunk_tokens=512), lambda: ours.prefill(prompt[:2048])]
    chunked, whole = best(works, max(2, options.repeats // 2))
    emit(
        f"prefill {length}: chunks of 512 / whole",
        "ms",
        chunked=chunked * 1e3,
        whole=whole * 1e3,
        ratio=chunked / whole,
    )

    free = ModelRunner(
        load_model(path, dtype="bfloat16", device=device),
        num_blocks=250,
        block_size=BLOCK_SIZE,
        cpu_kernel=not options.no_cpu_kernel,
    )
    free._attention = NoAttention()  # the floor under every backend
    (took,) = best([lambda: Ours(free).prefill(prompt[:32])], options.repeats)
    emit("floor: 32-token prefill without attention", "ms", value=took * 1e3)
    for size in (1, 8, 32):
        prompts = [prompt[:PROMPT_TOKENS]] * size
        (took,) = best([lambda: Ours(free).decode(prompts, 16)], 2)  # noqa: B023
        emit(f"floor: decode batch {size} without attention", "tokens/s", value=size * 16 / took)


if __name__ == "__main__":
    main()
