"""What this replica is and where it stands: the one place that service and reporter read it from."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from warmfront_pb.v1 import common_pb2, inference_pb2, worker_pb2

from cache.block_hash import HashScheme
from common.protocol import PROTOCOL_VERSION
from worker.adapters import AdapterReader
from worker.config import WorkerConfig
from worker.engine_core import Runner
from worker.metrics import HitRates
from worker.request import EngineSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """All that others must know of the loaded model. Fingerprints are equal exactly for equal content."""

    name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    tokenizer_json: str
    dtype: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and output
    kv_bytes_per_token: int
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    unk_token: str = ""
    pad_token: str = ""
    adds_bos: bool = False
    defaults: inference_pb2.SamplingParams = field(default_factory=inference_pb2.SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model ready to run, and what the serving half must know of it."""

    card: ModelCard
    runner: Runner
    num_blocks: int  # scratch block included
    max_num_batched_tokens: int
    adapter_reader: AdapterReader
    host_tokens_per_s: float = 0.0  # that come back from host memory; 0: there is none
    event_lag_s: float = 0.0  # cache events are held back for so long: a simulated fault


Progress: TypeAlias = Callable[[str, float | None], None]
"""Takes what is being done and the share of it that is done, 0 to 1; None where nobody knows."""


@dataclass(slots=True, kw_only=True)
class Replica:
    """One boot of one worker. Its event loop owns it; ``state`` only ever goes forward."""

    config: WorkerConfig
    scheme: HashScheme
    generation: str = field(default_factory=lambda: new_generation(time.time()))
    address: str = ""  # host:port, known once the server listens
    state: common_pb2.ReplicaState = common_pb2.STARTING
    fault: str = ""  # why it is not READY, where there is a reason
    card: ModelCard | None = None  # None until it has joined
    max_num_batched_tokens: int = 0
    host_tokens_per_s: float = 0.0

    @property
    def state_name(self) -> str:
        """The state in words."""
        return common_pb2.ReplicaState.Name(self.state)

    def contract(self) -> common_pb2.Contract:
        """What the whole fleet has agreed on. Only after this replica has joined it."""
        assert self.card is not None
        return self.contract_of(self.card)

    def contract_of(self, card: ModelCard) -> common_pb2.Contract:
        """What the whole fleet would have to agree on."""
        return common_pb2.Contract(
            model=card.model_fingerprint,
            tokenizer=card.tokenizer_fingerprint,
            dtype=card.dtype,
            kv_cache_dtype=card.dtype if self.config.kv_cache_dtype == "auto" else self.config.kv_cache_dtype,
            mode=self.config.mode,
            max_model_len=card.max_model_len,
            hash_algorithm=self.scheme.algorithm,
            hash_scheme=self.scheme.fingerprint(),
            block_size=self.scheme.block_size,
            served_model_name=card.name,
        )

    def lease(
        self, view: EngineSnapshot | None = None, hit_rates: HitRates | None = None, heartbeat: int = 0
    ) -> common_pb2.ReplicaLease:
        """The lease as it stands; contract and limits are empty while the model loads."""
        config = self.config
        lease = common_pb2.ReplicaLease(
            replica=config.replica_id,
            generation=self.generation,
            heartbeat=heartbeat,
            protocol_version=PROTOCOL_VERSION,
            address=self.address,
            state=self.state,
            heartbeat_ms=round(config.heartbeat_s * 1000),
            lease_ms=round(config.lease_s * 1000),
            fault=self.fault,
        )
        if self.card is None:
            return lease
        view = view or EngineSnapshot()
        hit_rates = hit_rates or HitRates()
        lease.contract.CopyFrom(self.contract())
        lease.limits.CopyFrom(
            common_pb2.Limits(
                max_model_len=self.card.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_queue=config.max_queue,
            )
        )
        lease.load.CopyFrom(
            common_pb2.Load(
                waiting=view.waiting,
                running=view.running,
                waiting_tokens=view.waiting_tokens,
                prefill_tokens_per_s=view.prefill_tokens_per_s,
            )
        )
        lease.cache.CopyFrom(
            common_pb2.CacheState(
                prefix_caching=config.enable_prefix_caching,
                last_seq=view.last_event_seq,
                kv_blocks=view.num_blocks,
                kv_blocks_used=view.num_used_blocks,
                kv_blocks_cached=view.num_cached_blocks,
                resident_hashes=view.num_cached_blocks,
                kv_bytes_per_token=self.card.kv_bytes_per_token,
                lru_age_s=view.lru_age_s,
                hit_rate_1m=hit_rates.last_minute,
                hit_rate_1h=hit_rates.last_hour,
                host_hit_rate_1h=hit_rates.host_last_hour,
                hit_rate=hit_rates.steady,
                hit_rate_verdict=hit_rates.verdict,
                token_reuse=config.token_reuse,
                host_kv_blocks=view.num_host_blocks,
                host_kv_blocks_cached=view.num_host_cached_blocks,
                host_tokens_per_s=self.host_tokens_per_s,
            )
        )
        return lease

    def model_response(self) -> worker_pb2.GetModelResponse:
        """What routers need to speak for this model. Only after it is loaded."""
        card = self.card
        assert card is not None
        return worker_pb2.GetModelResponse(
            served_model_name=card.name,
            tokenizer_json=card.tokenizer_json,
            chat_template=card.chat_template,
            bos_token=card.bos_token,
            eos_token=card.eos_token,
            unk_token=card.unk_token,
            pad_token=card.pad_token,
            eos_token_ids=card.eos_token_ids,
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            defaults=card.defaults,
            adds_bos=card.adds_bos,
            contract=self.contract(),
        )


def new_generation(now_s: float) -> str:
    """The name of one boot: 12 hex digits of milliseconds, so that later ones sort higher, and 6 random ones."""
    return f"{int(now_s * 1000):012x}-{secrets.token_hex(3)}"
