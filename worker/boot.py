"""From settings to a model that is ready to run: files, memory, runner, self-test.

The only place where the serving half of a worker meets the numeric one. Imports torch.
"""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from pathlib import Path

import psutil
import torch
from warmfront_pb.v1 import inference_pb2

from worker.config import ConfigError, WorkerConfig
from worker.host_blocks import BUFFER_BYTES, NUM_BUFFERS
from worker.kv_store import kv_format
from worker.loading import (
    LoadedModel,
    default_model_path,
    load_config,
    load_model,
    model_fingerprint,
    resolve_dtype,
)
from worker.loading.tokenizer import TokenizerFiles, load_tokenizer
from worker.model_runner import ModelRunner
from worker.models.config import GenerationDefaults, ModelConfig
from worker.plan import (
    MIN_BLOCKS,
    MemoryPlan,
    activation_bytes,
    adapter_bytes,
    check_host_room,
    describe,
    plan_blocks,
    plan_cpu,
    plan_device,
)
from worker.replica import Loaded, ModelCard, Progress

logger = logging.getLogger(__name__)

MIN_MODEL_LEN = 2  # one prompt token, one answer token
_CPU_STEP_TOKENS, _CUDA_STEP_TOKENS = 512, 8192
_QUANTISATION = re.compile(r"[._-](?:[Ii]?Q\d\w*|B?F16|F32)$")


def load_replica(config: WorkerConfig, progress: Progress) -> Loaded:
    """Load the model that ``config`` names and test it. Takes seconds to minutes.

    Raises ``ValueError`` for what cannot work, naming the remedy: ``ConfigError``, ``ModelError``, ``PlanError``, and
    ``SelfTestError`` when the model computes no numbers or mode deterministic does not hold on this machine.
    """
    path, device, step_tokens = config.model or default_model_path(), pick_device(config.device), _step_tokens(config)
    model = load_config(path)
    files = load_tokenizer(path)
    plan = plan_memory(config, model)
    max_model_len = _max_model_len(config, model, plan)
    progress("loading weights", 0.0)
    loaded = load_model(
        path, dtype=config.dtype, device=device, progress=lambda done, total: progress("loading weights", done / total)
    )
    progress("preparing the model", None)
    is_measured = device.type == "cuda" and config.kv_blocks is None
    runner = ModelRunner(
        loaded,
        num_blocks=MIN_BLOCKS if is_measured else plan.num_blocks,
        block_size=config.block_size,
        mode="deterministic" if config.mode == "deterministic" else "fast",
        attention=config.attention,
        kv_cache_dtype=config.kv_cache_dtype,
        max_num_batched_tokens=step_tokens,
        max_num_seqs=config.max_num_seqs,
        num_host_blocks=0 if is_measured else config.num_host_blocks,
    )
    if is_measured:
        progress("measuring the largest step", None)
        plan = plan_memory(config, model, step_bytes=runner.peak_bytes())
        max_model_len = _max_model_len(config, model, plan)
        runner.resize(plan.num_blocks, config.num_host_blocks)
    if device.type == "cuda":
        progress("compiling and recording decode steps", None)
        runner.record_decode_graphs()
    progress("testing itself", None)
    runner.self_test()
    host_tokens_per_s = runner.host_tokens_per_s()
    return Loaded(
        card=_card(config, path, loaded, files, max_model_len, plan.kv_bytes_per_token),
        runner=runner,
        num_blocks=plan.num_blocks,
        max_num_batched_tokens=step_tokens,
        adapter_reader=runner.lora_reader(config.max_lora_rank),
        host_tokens_per_s=host_tokens_per_s,
    )


def plan_memory(config: WorkerConfig, model: ModelConfig, step_bytes: int | None = None) -> MemoryPlan:
    """How many blocks the pool gets. Raises ``PlanError`` when nothing fits.

    ``step_bytes`` is what the largest step was seen to take beside weights and KV; None: an upper estimate.
    """
    dtype = resolve_dtype(config.dtype, model)
    element_bytes, kept = dtype.itemsize, kv_format(config.kv_cache_dtype, dtype)
    kv_bytes_per_token = model.kv_bytes_per_token(kept.element_bytes, kept.scale_bytes)
    weight_bytes = model.num_parameters * element_bytes
    if config.has_adapters:
        weight_bytes += config.max_loras * adapter_bytes(model, config.max_lora_rank, element_bytes)
    activations = step_bytes
    if activations is None:
        activations = activation_bytes(
            model,
            max_num_batched_tokens=_step_tokens(config),
            max_num_seqs=config.max_num_seqs,
            element_bytes=element_bytes,
        )
    block_bytes = kv_bytes_per_token * config.block_size
    machine_bytes = psutil.virtual_memory().total
    device = pick_device(config.device)
    if config.num_host_blocks:
        check_host_room(config.num_host_blocks, block_bytes, machine_bytes)
        activations += NUM_BUFFERS * max(block_bytes, min(BUFFER_BYTES, config.num_host_blocks * block_bytes))
    num_blocks = config.kv_blocks
    if num_blocks is None and device.type == "cpu" and config.cpu_kv_bytes is not None:
        num_blocks = max(1, config.cpu_kv_bytes // block_bytes)
    if num_blocks is not None:
        return plan_blocks(
            num_blocks=num_blocks + 1,
            kv_bytes_per_token=kv_bytes_per_token,
            block_size=config.block_size,
            weight_bytes=weight_bytes,
            activation_bytes=activations,
        )
    if device.type == "cpu":
        return plan_cpu(
            machine_bytes=machine_bytes,
            kv_bytes_per_token=kv_bytes_per_token,
            block_size=config.block_size,
            weight_bytes=weight_bytes,
            activation_bytes=activations,
        )
    return plan_device(
        device_bytes=torch.cuda.get_device_properties(device).total_memory,
        utilization=config.gpu_memory_utilization,
        weight_bytes=weight_bytes,
        activation_bytes=activations,
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=config.block_size,
    )


def plan_text(config: WorkerConfig) -> str:
    """What ``--plan`` prints. Loads no weights. Raises as ``load_replica`` does."""
    model = load_config(config.model or default_model_path())
    plan = plan_memory(config, model)
    device = pick_device(config.device)
    if device.type == "cpu" or config.kv_blocks is not None:
        return describe(plan, num_host_blocks=config.num_host_blocks)
    total = torch.cuda.get_device_properties(device).total_memory
    return describe(
        plan,
        utilization=config.gpu_memory_utilization,
        device_bytes=total,
        num_host_blocks=config.num_host_blocks,
    )


def pick_device(name: str) -> torch.device:
    """The device that ``--device`` means. Raises ``ConfigError`` for one that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def served_name(path: Path) -> str:
    """The name that a model's files give: its folder's, or its GGUF file's without the quantisation."""
    return path.resolve().name if path.is_dir() else _QUANTISATION.sub("", path.stem)


def _step_tokens(config: WorkerConfig) -> int:
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    default = _CPU_STEP_TOKENS if pick_device(config.device).type == "cpu" else _CUDA_STEP_TOKENS
    return max(default, config.max_num_seqs)


def _max_model_len(config: WorkerConfig, model: ModelConfig, plan: MemoryPlan) -> int:
    """Tokens that one request may have: what the model allows and the pool holds."""
    asked = config.max_model_len
    if asked is None:
        if plan.num_tokens < model.max_context:
            logger.warning(
                "max_model_len=%d: the pool of %d blocks holds no more; the model itself takes %d",
                plan.num_tokens,
                plan.num_blocks - 1,
                model.max_context,
            )
        return min(plan.num_tokens, model.max_context)
    if not MIN_MODEL_LEN <= asked <= model.max_context:
        raise ConfigError(f"--max-model-len {asked}: this model takes {MIN_MODEL_LEN} to {model.max_context} tokens")
    if asked > plan.num_tokens:
        raise ConfigError(
            f"--max-model-len {asked} does not fit the pool of {plan.num_blocks - 1} blocks, {plan.num_tokens} tokens: "
            f"lower it, or set --kv-blocks {-(-asked // config.block_size)} or more"
        )
    return asked


def _card(
    config: WorkerConfig,
    path: Path,
    loaded: LoadedModel,
    files: TokenizerFiles,
    max_model_len: int,
    kv_bytes_per_token: int,
) -> ModelCard:
    first_ids = files.tokenizer().encode("a").ids[:1]
    return ModelCard(
        name=config.served_model_name or served_name(path),
        model_fingerprint=model_fingerprint(path),
        tokenizer_fingerprint=files.fingerprint,
        tokenizer_json=files.tokenizer_json,
        dtype=str(loaded.dtype).removeprefix("torch."),
        vocab_size=loaded.config.vocab_size,
        max_model_len=max_model_len,
        kv_bytes_per_token=kv_bytes_per_token,
        eos_token_ids=files.eos_token_ids,
        chat_template=files.chat_template or "",
        bos_token=files.bos_token or "",
        eos_token=files.eos_token or "",
        unk_token=files.unk_token or "",
        pad_token=files.pad_token or "",
        adds_bos=loaded.config.bos_token_id is not None and first_ids == [loaded.config.bos_token_id],
        defaults=_defaults(loaded.config.generation),
    )


def _defaults(generation: GenerationDefaults) -> inference_pb2.SamplingParams:
    defaults = inference_pb2.SamplingParams()
    for field in fields(generation):
        value = getattr(generation, field.name)
        if value is not None:
            setattr(defaults, field.name, value)
    return defaults
