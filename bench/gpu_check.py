"""What a CUDA machine must show before anybody says that warmfront runs on CUDA. At most six minutes.

    python bench/gpu_check.py [--quick] [--device cuda]

Checks every attention backend against the definition of attention, the whole model and LoRA adapters against the
float32 CPU run, and the copies to host memory and back against what each block should hold, then prints the table of
``bench/engine.py`` for a random model of 1B shape (Llama 3.2) beside the floors that bandwidth and FLOP/s set. One JSON
line each; the exit code is 1 when a check fails. Needs torch, numpy, safetensors and, for the paged kernel, triton: no
ray, redis, cbor2, gguf or tokenizer.
With ``TRITON_INTERPRET=1 --device cpu --quick`` the checks alone run in Triton's interpreter.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    "decode": [(1, 1), (1, 17), (1, 700), (1, 64)],
    "prefill": [(130, 130)],
    "chunk on warm blocks": [(33, 500)],
    "mixed": [(1, 90), (40, 40), (3, 257), (1, 16)],
}


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
    out = backend.attend(queries, keys, values, backend.plan(spans, row))
    wanted = torch.cat([by_definition(queries, keys, values, span) for span in spans])
    return float((out.double() - wanted).abs().max())


def check_model(names: Sequence[str], device: torch.device) -> bool:
    """Logits of a small model on ``device`` against the CPU, whole, in chunks and with decode rows."""
    sound, prompt = True, [(index * 7 + index * index) % 1000 for index in range(100)]
    batches = [[(0, 60)], [(60, 97)], [(97, 98)], [(98, 100)]]

    def logits(runner: ModelRunner) -> Tensor:
        parts = [
            runner.all_logits(StepBatch(slices=[_slice(prompt[start:stop], start, range(1, 20), None)]))
            for ((start, stop),) in batches
        ]
        return torch.cat(parts).cpu()

    cpu = torch.device("cpu")
    wanted = logits(ModelRunner(random_weights(SMALL, torch.float32, cpu), num_blocks=20, block_size=BLOCK_SIZE))
    for name in names:
        loaded = random_weights(SMALL, torch.float32, cpu)  # CUDA draws other random numbers
        moved = replace(loaded, device=device, weights={key: one.to(device) for key, one in loaded.weights.items()})
        error = float(
            (logits(ModelRunner(moved, num_blocks=20, block_size=BLOCK_SIZE, attention=name)) - wanted).abs().max()
        )
        sound &= error <= 1e-3
        emit(f"model logits {name} float32", "max abs error", value=error, limit=1e-3)
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
        loaded = random_weights(SMALL, torch.float32, torch.device("cpu"))
        moved = replace(loaded, device=on, weights={key: one.to(on) for key, one in loaded.weights.items()})
        runner = ModelRunner(moved, num_blocks=20, block_size=BLOCK_SIZE)
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
    loaded = random_weights(SMALL, torch.float32, torch.device("cpu"))
    moved = replace(loaded, device=device, weights={key: one.to(device) for key, one in loaded.weights.items()})
    runner = ModelRunner(moved, num_blocks=64, block_size=BLOCK_SIZE, attention="triton", max_num_seqs=12)
    prompts = [[(index * 7 + row) % 1000 for index in range(20 + 9 * row)] for row in range(11)]
    free = iter(range(1, 64))
    tables = [[next(free) for _ in range(len(prompt) // BLOCK_SIZE + 1)] for prompt in prompts]
    record = None if device.type == "cuda" else _rerun
    with torch.inference_mode():
        runner._graphs = runner.make_decode_graphs(record)
    worst = 0.0
    for rows in (1, 3, 5, 11):
        for prompt, table in zip(prompts[:rows], tables, strict=False):
            runner.all_logits(StepBatch(slices=[_slice(prompt, 0, table, None)]))
        step = [_slice([7], len(prompt), table, GREEDY) for prompt, table in zip(prompts[:rows], tables, strict=False)]
        with torch.inference_mode():
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


def figures(names: Sequence[str], device: torch.device) -> None:
    size = 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    flops = 2 * size**3 / timed(lambda: a @ a, device)
    big = torch.ones(2**28, device=device, dtype=torch.bfloat16)
    bandwidth = big.numel() * 2 / timed(lambda: big.sum(), device)
    emit("floor: bf16 matmul 8192", "TFLOP/s", value=flops / 1e12)
    emit("floor: memory read", "GB/s", value=bandwidth / 1e9)
    _host_figures(device)
    for name in names:
        _figures_of(name, device, flops, bandwidth)
        torch.cuda.empty_cache()


def _host_figures(device: torch.device) -> None:
    """How fast the 1B model's blocks come back, beside one large copy from pinned memory."""
    pinned, target = torch.empty(2**28, dtype=torch.uint8, pin_memory=True), torch.empty(2**28, dtype=torch.uint8)
    target = target.to(device)
    link = 2**28 / timed(lambda: target.copy_(pinned, non_blocking=True), device)
    loaded = random_weights(BILLION, torch.bfloat16, device)
    runner = ModelRunner(loaded, num_blocks=1000, block_size=BLOCK_SIZE, num_host_blocks=1000)
    tokens_per_s = runner.host_tokens_per_s()
    emit("floor: pinned host memory to the device", "GB/s", value=link / 1e9)
    emit("host memory: tokens that come back", "tokens/s", value=tokens_per_s, floor=link / runner.kv_bytes_per_token)
    prompt, blocks = [(index * 31 + index * index) % 128_000 for index in range(4096)], list(range(1, 257))
    places = blocks[:-2]  # all but 32 tokens
    runner.copy([BlockCopies(places, places, BLOCK_SIZE, Tier.DEVICE, Tier.HOST)])

    def from_host() -> None:
        runner.copy([BlockCopies(places, places, BLOCK_SIZE, Tier.HOST, Tier.DEVICE)])
        _prefill(runner, prompt, 4096 - 32, blocks)

    emit("host memory: TTFT 4096", "ms", value=timed(from_host, device) * 1e3)
    emit("beside: TTFT cold 4096", "ms", value=timed(lambda: _prefill(runner, prompt, 0, blocks), device) * 1e3)


def _figures_of(name: str, device: torch.device, flops: float, bandwidth: float) -> None:
    prompt = [(index * 31 + index * index) % 128_000 for index in range(4096)]
    loaded = random_weights(BILLION, torch.bfloat16, device)
    weight_bytes, kv_bytes = loaded.weight_bytes, BILLION.kv_bytes_per_token(2)
    runner = ModelRunner(loaded, num_blocks=4200, block_size=BLOCK_SIZE, attention=name, max_num_seqs=128)
    for length in (512, 2048, 4096):
        blocks, floor = range(1, 300), 2 * BILLION.num_parameters * length / flops
        took = timed(lambda: _prefill(runner, prompt[:length], 0, blocks), device)  # noqa: B023
        emit(f"{name}: TTFT cold {length}", "ms", value=took * 1e3, floor=floor * 1e3, ratio=took / floor)
        took = timed(lambda: _prefill(runner, prompt[:length], length - 32, blocks), device)  # noqa: B023
        emit(f"{name}: TTFT warm {length}", "ms", value=took * 1e3)
    runner.record_decode_graphs()
    for count in (1, 8, 32, 128):
        tables = [range(1 + 32 * index, 33 + 32 * index) for index in range(count)]
        step = StepBatch(slices=[_slice([5], 480, table, GREEDY) for table in tables])
        took = timed(lambda: runner.execute(step), device)  # noqa: B023
        floor = (weight_bytes + count * 481 * kv_bytes) / bandwidth
        graphs, runner._graphs = runner._graphs, None
        unrecorded = timed(lambda: runner.execute(step), device)  # noqa: B023
        runner._graphs = graphs
        emit(
            f"{name}: decode batch {count}, context 480",
            "tokens/s",
            value=count / took,
            without_graphs=count / unrecorded,
            floor=count / floor,
            ratio=floor / took,
        )


def _prefill(runner: ModelRunner, prompt: Sequence[int], num_cached: int, blocks: Sequence[int]) -> None:
    for start in range(num_cached, len(prompt), 2048):
        chunk = prompt[start : start + 2048]
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


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the best of five, after two rounds for compilation."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[2:])


def emit(figure: str, unit: str, **values: float) -> None:
    print(
        json.dumps({"figure": figure, "unit": unit} | {key: float(f"{one:.4g}") for key, one in values.items()}),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="the checks without the table")
    options = parser.parse_args()
    device = torch.device(options.device)
    names = ["sdpa", "tiled", "triton"]
    dtypes = [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]
    print(
        json.dumps(
            {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__}
        )
    )
    sound = check_backends(names, dtypes, device)
    sound &= check_model(names, device)
    sound &= check_lora(device)
    sound &= check_decode_graphs(device)
    if device.type == "cuda":
        sound &= check_memory(device)
        torch.cuda.empty_cache()
    sound &= check_host_blocks(device)
    if not options.quick and device.type == "cuda":
        figures(["sdpa", "triton"], device)
    print(json.dumps({"passed": sound}))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
