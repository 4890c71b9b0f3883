"""What LoRA adapters add to a step: processor time with them / without, the two taking turns in one run.

    python bench/lora.py [--threads 1] [--repeats 9] [--rank 16]

Prints one JSON line per kind of step: answers that decode, or one prompt's chunk, with their rows spread over so many
adapters on every projection. Best of the rounds; mode fast, bfloat16, on the packaged SmolLM2.
"""

import argparse
import json
import time

import torch
from safetensors.torch import save

from worker.batch import SamplingParams, SequenceSlice, StepBatch
from worker.loading import default_model_path, load_model
from worker.lora import shapes_of
from worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0)
BLOCK_SIZE, CONTEXT, CHUNK = 16, 256, 256
NUM_ADAPTERS = 8


def add_adapters(runner: ModelRunner, rank: int) -> None:
    """Random ones on every projection, named 0, 1, ..."""
    config = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}).encode()
    for number in range(NUM_ADAPTERS):
        tensors = {}
        for module, (_, num_in, num_out) in shapes_of(runner.config).items():
            for half, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = torch.randn(shape) / 50
        runner.add_adapter(str(number), runner.lora_reader(rank)(config, save(tensors))[0])


def step_s(runner: ModelRunner, num_slices: int, num_tokens: int, num_adapters: int) -> float:
    """Processor seconds of one step; 0 adapters: the base model."""
    per_slice = (CONTEXT + CHUNK) // BLOCK_SIZE
    slices = [
        SequenceSlice(
            request_id="r",
            token_ids=range(5, 5 + num_tokens),
            start=CONTEXT if num_tokens == 1 else 0,
            block_ids=range(1 + index * per_slice, 1 + (index + 1) * per_slice),
            sampling=GREEDY,
            lora=str(index % num_adapters) if num_adapters else None,
        )
        for index in range(num_slices)
    ]
    begin = time.process_time()
    runner.execute(StepBatch(slices=slices))
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(default_model_path(), dtype="bfloat16", device=torch.device("cpu"))
    runner = ModelRunner(loaded, num_blocks=2 + NUM_ADAPTERS * (CONTEXT + CHUNK) // BLOCK_SIZE, block_size=BLOCK_SIZE)
    add_adapters(runner, options.rank)
    for name, num_slices, num_tokens in (("decode 1", 1, 1), ("decode 8", 8, 1), ("prefill 256", 1, CHUNK)):
        for num_adapters in (one for one in (1, 2, 4, 8) if one <= num_slices):
            rounds = [
                [step_s(runner, num_slices, num_tokens, count) for count in (0, num_adapters)]
                for _ in range(options.repeats)
            ]
            base_s, adapted_s = (min(column) for column in zip(*rounds, strict=True))
            line = {"step": name, "adapters": num_adapters, "rank": options.rank, "kernel": runner.attention}
            print(json.dumps({**line, "ratio": round(adapted_s / base_s, 2), "base_ms": round(1000 * base_s, 1)}))


if __name__ == "__main__":
    main()
