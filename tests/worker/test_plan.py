"""How memory becomes blocks."""

import pytest

from worker.models.config import ModelConfig
from worker.plan import GIB, PlanError, activation_bytes, check_host_room, describe, plan_blocks, plan_cpu, plan_device

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_context=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def device(utilization: float) -> int:
    plan = plan_device(
        device_bytes=100_000,
        utilization=utilization,
        weight_bytes=78_000,
        activation_bytes=0,
        kv_bytes_per_token=10,
        block_size=10,
    )
    return plan.num_blocks


def test_near_the_edge_a_little_utilisation_doubles_the_pool() -> None:
    assert (device(0.85), device(0.92)) == (70, 140)


def test_activations_come_out_of_the_share_too() -> None:
    plan = plan_device(
        device_bytes=1000,
        utilization=0.9,
        weight_bytes=500,
        activation_bytes=100,
        kv_bytes_per_token=1,
        block_size=10,
    )
    assert (plan.num_blocks, plan.num_tokens, plan.kv_bytes) == (30, 290, 300)


def test_no_room_is_an_error_that_says_what_to_change() -> None:
    with pytest.raises(PlanError, match="raise --gpu-memory-utilization"):
        device(0.78)
    with pytest.raises(PlanError, match="no share"):
        device(1.2)
    with pytest.raises(PlanError, match="at least 2"):
        plan_blocks(num_blocks=1, kv_bytes_per_token=1, block_size=16)


def test_a_plan_tells_of_host_memory_and_refuses_more_than_the_machine_has() -> None:
    plan = plan_blocks(num_blocks=101, kv_bytes_per_token=2**20, block_size=16)
    (row,) = [line for line in describe(plan, num_host_blocks=400).splitlines() if line.startswith("host memory")]
    assert row.split() == ["host", "memory", "6.27", "GiB", "401", "6,400", "1"]
    assert "host memory" not in describe(plan)
    with pytest.raises(PlanError, match=r"--host-kv-blocks 400 takes 6.25 GiB, this machine has 5.00 GiB: 320 blocks"):
        check_host_room(400, 16 * 2**20, 5 * GIB)


def test_kv_bytes_per_token_match_known_models() -> None:
    assert SMOLLM2.kv_bytes_per_token(2) == 23_040
    assert SMOLLM2.kv_bytes_per_token(4) == 46_080
    assert SMOLLM2.kv_bytes_per_token(1, 2) == 11_880  # one byte per number, two per head's scale
    assert round(SMOLLM2.num_parameters / 1e6, 1) == 134.5


def test_a_cpu_worker_takes_a_gibibyte_and_less_on_a_small_machine() -> None:
    def blocks(machine_bytes: int) -> int:
        return plan_cpu(
            machine_bytes=machine_bytes, kv_bytes_per_token=23_040, block_size=16, weight_bytes=1, activation_bytes=1
        ).num_blocks

    assert blocks(64 * GIB) == GIB // (16 * 23_040)
    assert blocks(2 * GIB) == GIB // 2 // (16 * 23_040)


def test_the_plan_names_sizes_for_the_chosen_share_and_for_five_points_less_and_more() -> None:
    activations = activation_bytes(SMOLLM2, max_num_batched_tokens=2048, max_num_seqs=64, element_bytes=2)
    plan = plan_device(
        device_bytes=80 * GIB,
        utilization=0.9,
        weight_bytes=270_000_000,
        activation_bytes=activations,
        kv_bytes_per_token=23_040,
        block_size=16,
    )
    text = describe(plan, utilization=0.9, device_bytes=80 * GIB)
    assert "22.5 KiB per token" in text
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["0.85", "0.90", "0.95"]
    assert f"{plan.num_blocks:,}" in text.splitlines()[-2]
    assert "conversations of 4,000 tokens" in text
    assert "chosen" in describe(plan_blocks(num_blocks=9, kv_bytes_per_token=23_040, block_size=16))
