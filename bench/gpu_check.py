"""What a CUDA machine must show before anybody says that warmfront runs on CUDA. At most six minutes.

    PYTHONPATH=.:proto python -P bench/gpu_check.py [--quick] [--device cuda:1] [--limit-s 350]

Checks every attention backend against the definition of attention, the whole model and LoRA adapters against the
float32 CPU run, what bfloat16 and small KV name as the next token, decode graphs, and the copies to host memory and
back against what each block should hold. Then prints the table of ``bench/engine.py`` for a random model of 1B shape
(Llama 3.2) beside the floors that bandwidth and FLOP/s set. One JSON line each, the last one with what failed and what
there was no time for. Exit codes: 0, 1 when a check fails, 3 when the time was over before all checks had been made; a
step that does not come back is cut off by name. Needs torch, numpy, safetensors and, for the paged kernels, triton: no
ray, redis, cbor2, gguf or tokenizer.
With ``TRITON_INTERPRET=1 --device cpu`` the checks run in Triton's interpreter, without the table.
"""

import argparse
import contextlib
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from cache.events import Tier
from cache.prefix_cache import BlockCopies
from worker.attention import Span, make_backend
from worker.batch import SamplingParams, SequenceSlice, StepBatch
from worker.kv_store import KVStore, Pages, kv_format
from worker.loading import LoadedModel
from worker.lora import shapes_of
from worker.model_runner import ModelRunner
from worker.models.config import ModelConfig, RopeConfig
from worker.plan import activation_bytes

GREEDY = SamplingParams(temperature=0)
BLOCK_SIZE = 16
LIMIT_S, LAST_BEGIN_S = 350.0, 40.0  # six minutes with the start of Python; no step begins so shortly before the end
EXIT_FAILED, EXIT_LATE = 1, 3
SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=4,
    hidden_size=256,
    intermediate_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=1000,
    max_context=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
BILLION = replace(
    SMALL,
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128_256,
    max_context=8192,
    rope=RopeConfig(theta=500_000.0),
)
CASES: dict[str, list[tuple[int, int]]] = {  # (rows, keys) of each sequence
    "decode": [(1, 1), (1, 17), (1, 1500), (1, 64)],  # the longest is walked in several parts
    "prefill": [(130, 130)],
    "chunk on warm blocks": [(33, 500)],
    "mixed": [(1, 90), (40, 40), (3, 257), (1, 16)],
}


Step = tuple[str, Callable[[], bool | None]]


class Steps:
    """Runs one step after the other for as long as there is time, and never longer.

    A step's work answers False where a check fails. What it raises fails it, and nothing else.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._running: int | None = None
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def run(self, limit_s: float) -> None:
        """Ends this process where a step has not ended in time."""
        last_begin_s = time.monotonic() + limit_s - LAST_BEGIN_S
        watchdog = threading.Timer(limit_s, self._cut_off)
        watchdog.daemon = True
        watchdog.start()
        for number, (name, work) in enumerate(self._steps):
            if time.monotonic() > last_begin_s:
                self.skipped.append(name)
                continue
            self._running = number
            try:
                sound = work()
            except Exception as error:
                print(json.dumps({"step": name, "error": f"{type(error).__name__}: {error}"}), flush=True)
                sound = False
            if sound is False:
                self.failed.append(name)
        watchdog.cancel()
        self._summary()

    def _cut_off(self) -> None:
        assert self._running is not None
        first, *others = (name for name, _ in self._steps[self._running :])
        self.skipped = [f"{first} (cut off)", *others]
        self._summary()
        os._exit(EXIT_LATE)

    def _summary(self) -> None:
        passed = not (self.failed or self.skipped)
        print(json.dumps({"passed": passed, "failed": self.failed, "skipped": self.skipped}), flush=True)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    generator = torch.Generator(device=device).manual_seed(1)
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (q_width, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_width, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_width, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, q_width),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    weights = {
        name: torch.randn(shape, generator=generator, device=device).mul_(shape[-1] ** -0.5).to(dtype)
        for name, shape in shapes.items()
    }
    norms = [
        f"model.layers.{n}.{part}_layernorm.weight"
        for n in range(config.num_layers)
        for part in ("input", "post_attention")
    ]
    weights |= {name: torch.ones(hidden, dtype=dtype, device=device) for name in [*norms, "model.norm.weight"]}
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights.values())
    return LoadedModel(
        path=Path("random"), config=config, weights=weights, weight_bytes=num_bytes, dtype=dtype, device=device
    )


SHAPES = (  # query heads, KV heads, head dimension, KV cache dtype
    (8, 2, 64, "auto"),
    (4, 4, 128, "auto"),
    (8, 1, 80, "auto"),
    (8, 2, 64, "int8"),
    (8, 2, 64, "fp8"),
)


def by_definition(queries: Tensor, keys: Pages, values: Pages, span: Span) -> Tensor:
    """Attention of one sequence in float64, ``[rows, heads * head_dim]``."""
    blocks = torch.tensor(list(span.block_ids), device=queries.device)
    k, v = (pages.blocks(blocks).flatten(0, 1)[: span.num_keys].double() for pages in (keys, values))
    group = queries.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    q = queries[span.first_row : span.first_row + span.num_rows].double()
    scores = torch.einsum("rhd,khd->hrk", q, k) / math.sqrt(q.shape[-1])
    last = torch.arange(span.num_rows, device=q.device)[:, None] + span.num_keys - span.num_rows
    hidden = torch.arange(span.num_keys, device=q.device)[None, :] > last
    shares = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hrk,khd->rhd", shares, v).flatten(1)


def check_backends(names: Sequence[str], dtypes: Sequence[torch.dtype], device: torch.device) -> bool:
    sound = True
    for name in names:
        for dtype in dtypes:
            for heads, kv_heads, head_dim, kept in SHAPES:
                worst = max(
                    _attention_error(name, dtype, device, heads, kv_heads, head_dim, kept, case)
                    for case in CASES.values()
                )
                limit = 2e-5 if dtype == torch.float32 else 2e-2
                sound &= worst <= limit
                emit(
                    f"attention {name} {dtype} {heads}/{kv_heads} heads of {head_dim}, KV {kept}",
                    "max abs error",
                    value=worst,
                    limit=limit,
                )
    return sound


def _attention_error(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kept: str,
    case: list[tuple[int, int]],
) -> float:
    torch.manual_seed(3)
    store = KVStore(
        num_layers=1,
        num_blocks=160,
        block_size=BLOCK_SIZE,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        kept=kv_format(kept, dtype),
    )
    numbers = torch.randn(2, 160 * BLOCK_SIZE, kv_heads, head_dim).to(device, dtype)
    store.write(0, torch.arange(160 * BLOCK_SIZE, device=device), *numbers)
    keys, values = store.layers[0]
    free = (torch.randperm(159) + 1).tolist()
    spans, row = [], 0
    for num_rows, num_keys in case:
        spans.append(Span(row, num_rows, num_keys, [free.pop() for _ in range(-(-num_keys // BLOCK_SIZE))]))
        row += num_rows
    queries = torch.randn(row, heads, head_dim).to(device, dtype)
    backend: Any = make_backend(
        name,
        deterministic=False,
        block_size=BLOCK_SIZE,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    with on_device(device):
        out = backend.attend(queries, keys, values, backend.plan(spans, row))
    wanted = torch.cat([by_definition(queries, keys, values, span) for span in spans])
    return float((out.double() - wanted).abs().max())


def on_device(device: torch.device) -> Any:
    """Where Triton is called directly; the runner sees to it itself."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def small_runner(
    device: torch.device, dtype: torch.dtype = torch.float32, *, attention: str = "auto", **more: Any
) -> ModelRunner:
    """The small model with the same weights everywhere: CUDA would draw others, so they are drawn on the CPU."""
    loaded = random_weights(SMALL, torch.float32, torch.device("cpu"))
    weights = {name: one.to(device, dtype) for name, one in loaded.weights.items()}
    moved = replace(loaded, device=device, dtype=dtype, weights=weights)
    more = {"num_blocks": 20, "cpu_kernel": False} | more
    return ModelRunner(moved, block_size=BLOCK_SIZE, attention=attention, **more)


def scores_of(runner: ModelRunner, prompt: Sequence[int]) -> Tensor:
    """Scores at all 100 positions: a whole prompt's beginning, a chunk on warm blocks, a decode row, a short chunk."""
    parts = [
        runner.all_logits(StepBatch(slices=[_slice(prompt[start:stop], start, range(1, 20), None)]))
        for start, stop in pairwise((0, 60, 97, 98, 100))
    ]
    return torch.cat(parts).cpu()


def check_model(names: Sequence[str], device: torch.device) -> bool:
    """Logits of a small model on ``device`` against the CPU."""
    sound, prompt = True, [(index * 7 + index * index) % 1000 for index in range(100)]
    wanted = scores_of(small_runner(torch.device("cpu")), prompt)
    for name in names:
        error = float((scores_of(small_runner(device, attention=name), prompt) - wanted).abs().max())
        sound &= error <= 1e-3
        emit(f"model logits {name} float32", "max abs error", value=error, limit=1e-3)
    return sound


def check_greedy(names: Sequence[str], device: torch.device, num_prompts: int) -> bool:
    """Where float32 is sure of its next token (a lead of 2**-6 of it), bfloat16 names the same, as often as on the CPU.

    The same for int8 and fp8 KV. A random model spreads its scores thinly, so that a few points fewer still pass.
    """
    slack = 0.02 if num_prompts >= 20 else 0.05
    prompts = [
        [(index * 7 + index * index * step + step) % 1000 for index in range(100)] for step in range(1, num_prompts + 1)
    ]
    cpu = torch.device("cpu")

    def scores(runner: ModelRunner) -> Tensor:
        return torch.cat([scores_of(runner, prompt) for prompt in prompts])

    exact = scores(small_runner(cpu))
    first, second = exact.topk(2, dim=-1).values.unbind(dim=-1)
    is_sure = first - second > first.abs() * 2**-6

    def same(runner: ModelRunner) -> float:
        return float((scores(runner).argmax(dim=-1) == exact.argmax(dim=-1))[is_sure].float().mean())

    sound = True
    for kept in ("auto", "int8", "fp8"):
        limit = same(small_runner(cpu, torch.bfloat16, kv_cache_dtype=kept)) - slack
        for name in names:
            value = same(small_runner(device, torch.bfloat16, attention=name, kv_cache_dtype=kept))
            sound &= value >= limit
            emit(f"greedy token {name} bfloat16, KV {kept}", f"of {int(is_sure.sum())}", value=value, limit=limit)
    return sound


def check_lora(device: torch.device) -> bool:
    """Two adapters and the base model side by side in one step on ``device``, against the CPU."""
    generator, adapters = torch.Generator().manual_seed(3), {}
    for name, rank in (("a", 8), ("b", 3)):
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": "all-linear"}
        tensors = {
            f"base_model.model.{module}.lora_{half}.weight": torch.randn(shape, generator=generator) / 20
            for module, (_, num_in, num_out) in shapes_of(SMALL).items()
            for half, shape in (("A", (rank, num_in)), ("B", (num_out, rank)))
        }
        adapters[name] = json.dumps(config).encode(), save(tensors)
    prompt = [(index * 7 + index * index) % 1000 for index in range(60)]

    def logits(on: torch.device) -> Tensor:
        runner = small_runner(on)
        for name, files in adapters.items():
            runner.add_adapter(name, runner.lora_reader(64)(*files)[0])
        parts = []
        for start, stop in ((0, 50), (50, 59), (59, 60)):
            slices = [
                _slice(prompt[start:stop], start, range(1 + 6 * n, 7 + 6 * n), None, name)
                for n, name in enumerate(("a", None, "b"))
            ]
            parts.append(runner.all_logits(StepBatch(slices=slices)))
        return torch.cat(parts).cpu()

    error = float((logits(device) - logits(torch.device("cpu"))).abs().max())
    emit("logits of two adapters and the base in one step, float32", "max abs error", value=error, limit=1e-3)
    return error <= 1e-3


def check_host_blocks(device: torch.device) -> bool:
    """Blocks go to host memory, are overwritten at once, and come back elsewhere: each must hold its own number.

    Nothing waits for the device between the copies, so what is ordered wrongly gets the numbers of others.
    """
    store = KVStore(
        num_layers=2,
        num_blocks=400,
        block_size=BLOCK_SIZE,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device=device,
        num_host_blocks=600,
    )
    rng, numbers, in_host = random.Random(7), [0] * 400, dict[int, int]()
    for count in range(100):
        blocks, places = rng.sample(range(1, 400), 150), rng.sample(range(1, 601), 150)
        store.copy([BlockCopies(blocks, places, BLOCK_SIZE, Tier.DEVICE, Tier.HOST)])
        in_host |= {place: numbers[block] for block, place in zip(blocks, places, strict=True)}
        number = count + 1  # exact in bfloat16
        store.data.index_fill_(2, torch.tensor(blocks, device=device), number)
        back = rng.sample(list(in_host), 100)
        store.copy([BlockCopies(back, blocks[:100], BLOCK_SIZE, Tier.HOST, Tier.DEVICE)])
        for block in blocks[100:]:
            numbers[block] = number
        for place, block in zip(back, blocks, strict=False):
            numbers[block] = in_host[place]
    wanted = torch.tensor(numbers[1:], device=device, dtype=torch.bfloat16)
    held = store.data[:, :, 1:].movedim(2, 0).flatten(1)
    num_wrong = int((held != wanted[:, None]).any(dim=1).sum())
    emit("host memory: blocks that do not hold their own", "blocks", value=num_wrong, limit=0)
    return not num_wrong


def check_decode_graphs(device: torch.device) -> bool:
    """Decode steps recorded as graphs against the same steps as they are, for numbers of rows that fill no recording.

    On a CPU nothing can be recorded: the work behind the recordings runs anew each time, padded and planned as on CUDA.
    """
    runner = small_runner(device, attention="triton", num_blocks=64, max_num_seqs=12)
    prompts = [[(index * 7 + row) % 1000 for index in range(20 + 9 * row)] for row in range(11)]
    free = iter(range(1, 64))
    tables = [[next(free) for _ in range(len(prompt) // BLOCK_SIZE + 1)] for prompt in prompts]
    record = None if device.type == "cuda" else _rerun
    with torch.inference_mode(), on_device(device):
        runner._graphs = runner.make_decode_graphs(record)
    worst = 0.0
    for rows in (1, 3, 5, 11):
        for prompt, table in zip(prompts[:rows], tables, strict=False):
            runner.all_logits(StepBatch(slices=[_slice(prompt, 0, table, None)]))
        step = [_slice([7], len(prompt), table, GREEDY) for prompt, table in zip(prompts[:rows], tables, strict=False)]
        with torch.inference_mode(), on_device(device):
            recorded = runner._recorded_logits(step)
            assert recorded is not None
            recorded = recorded.clone()
            worst = max(worst, float((recorded - runner._logits(runner._hidden(step), range(rows))).abs().max()))
    emit("decode graphs against plain steps, float32", "max abs error", value=worst, limit=1e-3)
    return worst <= 1e-3


def _rerun(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    scores = work()

    def again() -> None:
        scores.copy_(work())

    return again, scores


def check_memory(device: torch.device) -> bool:
    """The largest step as measured, beside the estimate that planning begins with."""
    loaded = random_weights(BILLION, torch.bfloat16, device)
    runner = ModelRunner(loaded, num_blocks=2, block_size=BLOCK_SIZE, max_num_batched_tokens=8192, max_num_seqs=256)
    measured = runner.peak_bytes()
    estimate = activation_bytes(BILLION, max_num_batched_tokens=8192, max_num_seqs=256, element_bytes=2)
    emit("largest step, 8,192 tokens, 256 rows", "GiB", measured=measured / 2**30, estimate=estimate / 2**30)
    return measured > 0


class Figures:
    """The table. ``floors`` comes first: the others stand beside what it measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flops = self._bandwidth = math.nan
        self._prompt = [(index * 31 + index * index) % 128_000 for index in range(8000)]

    def floors(self) -> None:
        size = 8192
        a = torch.randn(size, size, device=self._device, dtype=torch.bfloat16)
        self._flops = 2 * size**3 / self._timed(lambda: a @ a)
        big = torch.ones(2**28, device=self._device, dtype=torch.bfloat16)
        self._bandwidth = big.numel() * 2 / self._timed(lambda: big.sum())
        emit("floor: bf16 matmul 8192", "TFLOP/s", value=self._flops / 1e12)
        emit("floor: memory read", "GB/s", value=self._bandwidth / 1e9)

    def prefill(self, name: str, kept: str = "auto") -> None:
        """Cold, with all but 32 tokens cached, and cut into chunks."""
        runner, blocks = self._runner(name, kept), range(1, 300)
        label = name if kept == "auto" else f"{name}, KV {kept}"
        for length in (512, 2048, 4096):
            floor = 2 * BILLION.num_parameters * length / self._flops
            took = self._timed(partial(_prefill, runner, self._prompt[:length], 0, blocks))
            emit(f"{label}: TTFT cold {length}", "ms", value=took * 1e3, floor=floor * 1e3, ratio=took / floor)
            took = self._timed(partial(_prefill, runner, self._prompt[:length], length - 32, blocks))
            emit(f"{label}: TTFT warm {length}", "ms", value=took * 1e3)
        chunked = self._timed(partial(_prefill, runner, self._prompt[:2048], 0, blocks, 512))
        whole = self._timed(partial(_prefill, runner, self._prompt[:2048], 0, blocks))
        figure = f"{label}: prefill 2048, chunks of 512 / whole"
        emit(figure, "ms", chunked=chunked * 1e3, whole=whole * 1e3, ratio=chunked / whole)

    def decode(self, name: str, kept: str = "auto") -> None:
        """Steps of many rows of little context and of few rows of much, as graphs and as they are."""
        runner = self._runner(name, kept)
        label = name if kept == "auto" else f"{name}, KV {kept}"
        kv_bytes, weight_bytes = runner.kv_bytes_per_token, 2 * BILLION.num_parameters
        runner.record_decode_graphs()
        for count, context in ((1, 480), (8, 480), (32, 480), (128, 480), (1, 7900), (8, 7900)):
            per_row = context // BLOCK_SIZE + 1
            tables = [range(1 + per_row * row, 1 + per_row * (row + 1)) for row in range(count)]
            step = StepBatch(slices=[_slice([5], context, table, GREEDY) for table in tables])
            took = self._timed(partial(runner.execute, step))
            graphs, runner._graphs = runner._graphs, None
            unrecorded = self._timed(partial(runner.execute, step))
            runner._graphs = graphs
            floor = (weight_bytes + count * (context + 1) * kv_bytes) / self._bandwidth
            emit(
                f"{label}: decode batch {count}, context {context}",
                "tokens/s",
                value=count / took,
                without_graphs=count / unrecorded,
                floor=count / floor,
                ratio=floor / took,
            )

    def host_memory(self) -> None:
        """How fast the 1B model's blocks come back, beside one large copy from pinned memory."""
        pinned, target = torch.empty(2**28, dtype=torch.uint8, pin_memory=True), torch.empty(2**28, dtype=torch.uint8)
        target = target.to(self._device)
        link = 2**28 / self._timed(lambda: target.copy_(pinned, non_blocking=True))
        runner = self._runner("auto", num_blocks=1000, num_host_blocks=1000)
        per_s, floor = runner.host_tokens_per_s(), link / runner.kv_bytes_per_token
        emit("floor: pinned host memory to the device", "GB/s", value=link / 1e9)
        emit("host memory: tokens that come back", "tokens/s", value=per_s, floor=floor)
        prompt, blocks = self._prompt[:4096], list(range(1, 257))
        places = blocks[:-2]  # all but 32 tokens
        runner.copy([BlockCopies(places, places, BLOCK_SIZE, Tier.DEVICE, Tier.HOST)])

        def from_host() -> None:
            runner.copy([BlockCopies(places, places, BLOCK_SIZE, Tier.HOST, Tier.DEVICE)])
            _prefill(runner, prompt, 4096 - 32, blocks)

        emit("host memory: TTFT 4096", "ms", value=self._timed(from_host) * 1e3)
        cold = self._timed(lambda: _prefill(runner, prompt, 0, blocks))
        emit("beside: TTFT cold 4096", "ms", value=cold * 1e3)

    def _runner(
        self, name: str, kept: str = "auto", *, num_blocks: int = 4200, num_host_blocks: int = 0
    ) -> ModelRunner:
        torch.cuda.empty_cache()
        loaded = random_weights(BILLION, torch.bfloat16, self._device)
        return ModelRunner(
            loaded,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            attention=name,
            kv_cache_dtype=kept,
            max_num_seqs=128,
            num_host_blocks=num_host_blocks,
        )

    def _timed(self, work: Callable[[], Any]) -> float:
        """Seconds of the best of five, after two rounds for compilation."""
        times = []
        for _ in range(7):
            torch.cuda.synchronize(self._device)
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize(self._device)
            times.append(time.perf_counter() - begin)
        return min(times[2:])


def _prefill(
    runner: ModelRunner, prompt: Sequence[int], num_cached: int, blocks: Sequence[int], chunk_tokens: int = 2048
) -> None:
    for start in range(num_cached, len(prompt), chunk_tokens):
        chunk = prompt[start : start + chunk_tokens]
        sampling = GREEDY if start + len(chunk) == len(prompt) else None
        runner.execute(StepBatch(slices=[_slice(chunk, start, blocks, sampling)]))


def _slice(
    token_ids: Sequence[int],
    start: int,
    blocks: Sequence[int],
    sampling: SamplingParams | None,
    lora: str | None = None,
) -> SequenceSlice:
    return SequenceSlice(
        request_id="", token_ids=token_ids, start=start, block_ids=blocks, sampling=sampling, lora=lora
    )


def emit(figure: str, unit: str, **values: float) -> None:
    print(
        json.dumps({"figure": figure, "unit": unit} | {key: float(f"{one:.4g}") for key, one in values.items()}),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="the checks without the table")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="what is not done by then is skipped by name")
    options = parser.parse_args()
    device = torch.device(options.device)
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}), flush=True)
    checks = checks_on(device)
    steps = Steps([*checks, *(figures_on(device) if is_cuda and not options.quick else [])])
    steps.run(options.limit_s)
    if steps.failed:
        return EXIT_FAILED
    return EXIT_LATE if {name for name, _ in checks} & set(steps.skipped) else 0


def checks_on(device: torch.device) -> list[Step]:
    is_cuda, names = device.type == "cuda", ["triton", "sdpa", "tiled"]
    dtypes = [torch.float32, torch.bfloat16] if is_cuda else [torch.float32]  # the interpreter's bf16 is none
    return [
        *((f"check: attention {name}", partial(check_backends, [name], dtypes, device)) for name in names),
        ("check: model", partial(check_model, names, device)),
        ("check: LoRA", partial(check_lora, device)),
        ("check: decode graphs", partial(check_decode_graphs, device)),
        ("check: host memory", partial(check_host_blocks, device)),
        ("check: greedy tokens", partial(check_greedy, names if is_cuda else names[1:], device, 20 if is_cuda else 2)),
        *([("check: largest step", partial(check_memory, device))] if is_cuda else []),
    ]


def figures_on(device: torch.device) -> list[Step]:
    figures = Figures(device)
    return [
        ("figures: floors", figures.floors),
        ("figures: prefill", partial(figures.prefill, "triton")),
        ("figures: decode", partial(figures.decode, "triton")),
        *((f"figures: decode, KV {kept}", partial(figures.decode, "triton", kept)) for kept in ("fp8", "int8")),
        *((f"figures: prefill, KV {kept}", partial(figures.prefill, "triton", kept)) for kept in ("fp8", "int8")),
        ("figures: host memory", figures.host_memory),
        ("figures: prefill, sdpa", partial(figures.prefill, "sdpa")),
        ("figures: decode, sdpa", partial(figures.decode, "sdpa")),
    ]


if __name__ == "__main__":
    sys.exit(main())
