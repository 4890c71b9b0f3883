from __future__ import annotations

from typing import Any

import pytest

from worker.config import ConfigError, WorkerConfig

REDIS = "redis://user:hunter2@127.0.0.1:6379/0"


def config(**more: Any) -> WorkerConfig:
    return WorkerConfig(**{"replica_id": "w0", "redis_url": REDIS, **more})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"redis_url": ""}, "--redis"),
        ({"redis_url": "http://x"}, "--redis.*http"),
        ({"replica_id": "a b"}, "--replica-id"),
        ({"fleet": "{x}"}, "--fleet"),
        ({"port": 70000}, "--port 70000"),
        ({"metrics_port": -1}, "--metrics-port"),
        ({"listen": "0.0.0.0"}, "--insecure-listen"),
        ({"listen": "10.0.0.1", "insecure_listen": True}, "--worker-token-file"),
        ({"listen": "0.0.0.0", "insecure_listen": True, "worker_token": "long enough"}, "--advertise"),
        ({"worker_token": "short"}, "--worker-token-file"),
        ({"worker_token": "long enough\nshort"}, "--worker-token-file"),
        ({"prefix_caching_hash_algo": "md5"}, "--prefix-caching-hash-algo"),
        ({"prefix_caching_hash_algo": "xxhash"}, "WARMFRONT_HASH_SEED"),
        ({"block_size": 4}, "--block-size 4"),
        ({"kv_blocks": 0}, "--kv-blocks 0"),
        ({"host_kv_blocks": -5}, "--host-kv-blocks -5"),
        ({"host_tokens_per_s": 0.0}, "--host-tokens-per-s 0"),
        ({"token_reuse_min": 16}, "--token-reuse-min 16"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"cpu_kv_bytes": 5}, "--cpu-kv-bytes"),
        ({"dtype": "float64"}, "--dtype"),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype 'int4' is none of auto, bfloat16, float32, int8, fp8"),
        ({"mode": "quick"}, "--mode"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "--max-num-batched-tokens 8"),
        ({"max_queue": 0}, "--max-queue"),
        ({"heartbeat_s": 3.0, "lease_s": 5.0}, "--heartbeat 3s"),
        ({"drain_deadline_s": -1.0}, "--drain-deadline"),
        ({"step_limit_s": 0.0}, "--step-limit"),
        ({"log_level": "LOUD"}, "--log-level"),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_of_its_flag(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**settings)


def test_secrets_stay_out_of_the_repr() -> None:
    text = repr(config(worker_token="s3cret-token", hash_seed="s33d"))
    assert not any(secret in text for secret in ("hunter2", "s3cret-token", "s33d"))


def test_a_worker_may_be_reached_from_outside_with_token_and_consent() -> None:
    given = config(listen="0.0.0.0", insecure_listen=True, worker_token="long enough", advertise="worker-0")
    assert given.advertise == "worker-0"


@pytest.mark.parametrize(
    "where", ["worker-0", "worker-0.pods:8001", "10.0.0.7", "10.0.0.7:1", "fd00::7", "[fd00::7]:65535"]
)
def test_routers_may_be_told_a_host_an_address_and_a_port(where: str) -> None:
    assert config(advertise=where).advertise == where


@pytest.mark.parametrize("where", [":::", "a:99999", "a:0", "[fd00::7]", "[a]:1", "a:b", "http://a:1", "a b", "a:1:2"])
def test_an_address_that_no_router_could_call_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="--advertise"):
        config(advertise=where)
