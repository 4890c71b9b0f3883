"""From settings to the pool of blocks and to what the fleet must agree on."""

import pytest

from cache.block_hash import HashScheme
from worker.boot import plan_memory
from worker.config import WorkerConfig
from worker.models.config import ModelConfig
from worker.replica import ModelCard, Replica

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
CARD = ModelCard(
    name="m",
    model_fingerprint="m",
    tokenizer_fingerprint="t",
    tokenizer_json="",
    dtype="bfloat16",
    vocab_size=10,
    max_model_len=64,
    kv_bytes_per_token=1,
)


def settings(kv_cache_dtype: str) -> WorkerConfig:
    return WorkerConfig(
        replica_id="w0",
        redis_url="redis://127.0.0.1:1/0",
        device="cpu",
        dtype="bfloat16",
        cpu_kv_bytes=64 * 2**20,
        kv_cache_dtype=kv_cache_dtype,
    )


def test_one_budget_holds_nearly_twice_the_blocks_with_one_byte_per_number() -> None:
    plain, small = (plan_memory(settings(name), SMOLLM2) for name in ("auto", "int8"))
    assert (plain.kv_bytes_per_token, small.kv_bytes_per_token) == (23_040, 11_880)
    assert (plain.num_blocks - 1, small.num_blocks - 1) == (182, 353)  # 128 / 66 times as many
    assert plan_memory(settings("fp8"), SMOLLM2) == small
    assert plan_memory(settings("bfloat16"), SMOLLM2) == plain
    assert plan_memory(settings("float32"), SMOLLM2).num_blocks - 1 == 91
    assert small.weight_bytes == plain.weight_bytes


@pytest.mark.parametrize(
    ("asked", "kept"), [("auto", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32"), ("fp8", "fp8")]
)
def test_the_contract_names_what_auto_came_to(asked: str, kept: str) -> None:
    assert Replica(config=settings(asked), scheme=HashScheme(), card=CARD).contract().kv_cache_dtype == kept
