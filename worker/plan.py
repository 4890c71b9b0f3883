"""How much KV cache fits: arithmetic only, no torch, no device.

``--gpu-memory-utilization`` has vLLM's meaning: the share of the WHOLE device that weights, activations and KV take
together. The pool gets what the first two leave of it, so near the edge a little more utilisation is a lot more cache:
with weights on 0.78 of the device, 0.85 leaves 0.07 for KV and 0.92 leaves 0.14.
"""

from dataclasses import dataclass, replace

from worker.models.config import ModelConfig

GIB = 2**30
CONVERSATION_TOKENS = 4000
MIN_BLOCKS = 2  # scratch and one to use
DEFAULT_CPU_KV_BYTES = 1 * GIB  # per worker; also never above a quarter of the machine


class PlanError(ValueError):
    """The model and the asked limits do not fit; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes and how many blocks that is."""

    num_blocks: int  # scratch block included
    block_size: int
    kv_bytes_per_token: int
    weight_bytes: int
    activation_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens the pool holds."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_conversations(self) -> int:
        """Conversations of 4,000 tokens the pool holds side by side, nothing shared."""
        return self.num_tokens // CONVERSATION_TOKENS

    @property
    def kv_bytes(self) -> int:
        """What the pool takes."""
        return self.num_blocks * self.block_size * self.kv_bytes_per_token


def plan_device(
    *,
    device_bytes: int,
    utilization: float,
    weight_bytes: int,
    activation_bytes: int,
    kv_bytes_per_token: int,
    block_size: int,
) -> MemoryPlan:
    """The pool of a device with memory of its own.

    Raises ``PlanError`` when ``utilization`` is no share or leaves no room for KV.
    """
    if not 0 < utilization <= 1:
        raise PlanError(f"--gpu-memory-utilization {utilization} is no share of the device: above 0, at most 1")
    budget = int(device_bytes * utilization)
    return _plan(budget, weight_bytes, activation_bytes, kv_bytes_per_token, block_size)


def plan_cpu(
    *, machine_bytes: int, kv_bytes_per_token: int, block_size: int, weight_bytes: int, activation_bytes: int
) -> MemoryPlan:
    """The pool of a worker on the CPU, which shares its memory with the rest of the machine: 1 GiB of KV.

    On small machines less: a quarter of the memory. ``--kv-blocks`` says otherwise.
    """
    kv_bytes = min(DEFAULT_CPU_KV_BYTES, machine_bytes // 4)
    budget = kv_bytes + weight_bytes + activation_bytes
    return _plan(budget, weight_bytes, activation_bytes, kv_bytes_per_token, block_size)


def plan_blocks(
    *, num_blocks: int, kv_bytes_per_token: int, block_size: int, weight_bytes: int = 0, activation_bytes: int = 0
) -> MemoryPlan:
    """The pool that ``--kv-blocks`` asks for. Raises ``PlanError`` below two blocks."""
    if num_blocks < MIN_BLOCKS:
        raise PlanError(f"--kv-blocks {num_blocks}: at least {MIN_BLOCKS} are needed, one of them is scratch")
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=block_size,
        kv_bytes_per_token=kv_bytes_per_token,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
    )


def activation_bytes(config: ModelConfig, *, max_num_batched_tokens: int, max_num_seqs: int, element_bytes: int) -> int:
    """An upper estimate of what one step needs beside weights and KV; a CUDA worker measures it instead.

    Per row: the residual, its norm, q, k, v and the attention answer, gate, up and their product, with the copies that
    live for a moment; float32 scores of one row per sequence, twice while sampling.
    """
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_row = (4 * config.hidden_size + 3 * heads + 4 * config.intermediate_size) * element_bytes
    return max_num_batched_tokens * per_row + max_num_seqs * config.vocab_size * 4 * 3


def adapter_bytes(config: ModelConfig, rank: int, element_bytes: int) -> int:
    """What one LoRA adapter of this rank takes that changes every projection, laid out as in ``worker.lora``."""
    heads, inner = config.num_heads * config.head_dim, config.intermediate_size
    qkv = 3 * (config.hidden_size + heads + 2 * config.num_kv_heads * config.head_dim)
    per_layer = qkv + (heads + config.hidden_size) + 3 * (config.hidden_size + inner)
    return config.num_layers * per_layer * (rank + 3) * element_bytes  # ranks are padded to a multiple of 4


def check_host_room(num_blocks: int, block_bytes: int, machine_bytes: int) -> None:
    """Raises ``PlanError`` where ``--host-kv-blocks`` takes more than the machine has."""
    if num_blocks * block_bytes > machine_bytes:
        raise PlanError(
            f"--host-kv-blocks {num_blocks} takes {_gib(num_blocks * block_bytes)}, this machine has "
            f"{_gib(machine_bytes)}: {machine_bytes // block_bytes} blocks would fill it"
        )


def describe(
    plan: MemoryPlan,
    *,
    utilization: float | None = None,
    device_bytes: int | None = None,
    num_host_blocks: int = 0,
) -> str:
    """The text of ``--plan``. With ``utilization`` and ``device_bytes``: also for 0.05 less and more."""
    host = replace(plan, num_blocks=num_host_blocks + 1)
    host_rows = [_row("host memory", host)] if num_host_blocks else []
    lines = [
        f"KV cache    {plan.kv_bytes_per_token / 1024:.1f} KiB per token, blocks of {plan.block_size} tokens",
        f"weights     {_gib(plan.weight_bytes)}",
        f"activations {_gib(plan.activation_bytes)}",
        "",
        f"{'':12}{'KV cache':>12}{'blocks':>12}{'tokens':>12}{'conversations of 4,000 tokens':>32}",
    ]
    if utilization is None or device_bytes is None:
        return "\n".join([*lines, _row("chosen", plan), *host_rows])
    for share in (utilization - 0.05, utilization, utilization + 0.05):
        if not 0 < share <= 1:
            continue
        label = f"{share:.2f}{' chosen' if share == utilization else ''}"
        try:
            row = _row(
                label,
                plan_device(
                    device_bytes=device_bytes,
                    utilization=share,
                    weight_bytes=plan.weight_bytes,
                    activation_bytes=plan.activation_bytes,
                    kv_bytes_per_token=plan.kv_bytes_per_token,
                    block_size=plan.block_size,
                ),
            )
        except PlanError:
            row = f"{label:12}{'does not fit':>12}"
        lines.append(row)
    return "\n".join([*lines, *host_rows])


def _plan(budget: int, weight_bytes: int, activations: int, kv_bytes_per_token: int, block_size: int) -> MemoryPlan:
    left = budget - weight_bytes - activations
    num_blocks = left // (kv_bytes_per_token * block_size)
    if num_blocks < MIN_BLOCKS:
        raise PlanError(
            f"no room for KV: weights take {_gib(weight_bytes)} and activations {_gib(activations)} of a budget of "
            f"{_gib(budget)}; raise --gpu-memory-utilization, lower --max-num-batched-tokens, or take a larger device"
        )
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=block_size,
        kv_bytes_per_token=kv_bytes_per_token,
        weight_bytes=weight_bytes,
        activation_bytes=activations,
    )


def _row(label: str, plan: MemoryPlan) -> str:
    return (
        f"{label:12}{_gib(plan.kv_bytes):>12}{plan.num_blocks:>12,}{plan.num_tokens:>12,}{plan.num_conversations:>32,}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
