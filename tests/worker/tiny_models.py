"""Small random models, and the two lines that every model test needs."""

import functools
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from worker.batch import SamplingParams, SequenceSlice, StepBatch
from worker.loading import default_model_path, load_model
from worker.model_runner import Mode, ModelRunner

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
GOLDEN_TOKENS = Path(__file__).parents[1] / "golden" / "smollm2_tokens.jsonl"

SMALL: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_model(model_type: str, **settings: Any) -> PreTrainedModel:
    """A transformers model whose weights, norms and biases included, are random and large enough to matter."""
    torch.manual_seed(20261130)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **settings})).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.15)
    return model


@functools.cache
def shape_of_smollm2() -> LlamaConfig:
    """The packaged model's configuration as transformers reads it, which takes seconds."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    return LlamaConfig(**load_gguf_checkpoint(str(default_model_path()))["config"])


def write_folder(model: PreTrainedModel, folder: Path, **save: Any) -> Path:
    model.save_pretrained(folder, **save)
    return folder


def runner_of(
    path: Path,
    *,
    mode: Mode = "fast",
    dtype: str = "float32",
    num_blocks: int = 64,
    block_size: int = 16,
    attention: str = "auto",
    kv_cache_dtype: str = "auto",
    cpu_kernel: bool = True,
    num_host_blocks: int = 0,
) -> ModelRunner:
    loaded = load_model(path, dtype=dtype, device=CPU)
    return ModelRunner(
        loaded,
        num_blocks=num_blocks,
        block_size=block_size,
        mode=mode,
        attention=attention,
        kv_cache_dtype=kv_cache_dtype,
        cpu_kernel=cpu_kernel,
        num_host_blocks=num_host_blocks,
    )


def slice_of(
    token_ids: Sequence[int],
    start: int,
    block_ids: Sequence[int],
    sampling: SamplingParams | None = None,
    **more: Any,
) -> SequenceSlice:
    return SequenceSlice(
        request_id="r", token_ids=token_ids, start=start, block_ids=block_ids, sampling=sampling, **more
    )


def logits_of(
    runner: ModelRunner, token_ids: Sequence[int], cuts: Sequence[int] = (), lora: str | None = None
) -> Tensor:
    """Scores at every position of one prompt, computed in the pieces that ``cuts`` make of it."""
    blocks = range(1, runner.kv.num_blocks)
    bounds = [0, *cuts, len(token_ids)]
    parts = [
        runner.all_logits(StepBatch(slices=[slice_of(token_ids[start:stop], start, blocks, lora=lora)]))
        for start, stop in pairwise(bounds)
    ]
    return torch.cat(parts)


def greedy_text(runner: ModelRunner, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The next ``num_tokens`` likeliest tokens, by one prefill and decode steps."""
    blocks = range(1, runner.kv.num_blocks)
    output: list[int] = []
    chunk, start = list(token_ids), 0
    while len(output) < num_tokens:
        (result,) = runner.execute(StepBatch(slices=[slice_of(chunk, start, blocks, GREEDY)]))
        assert result.token_id is not None, result.error
        output.append(result.token_id)
        start, chunk = start + len(chunk), [result.token_id]
    return output


def golden_texts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in GOLDEN_TOKENS.read_text(encoding="utf-8").splitlines()]
