from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    STARTING: _ClassVar[ReplicaState]
    WARMING: _ClassVar[ReplicaState]
    READY: _ClassVar[ReplicaState]
    DRAINING: _ClassVar[ReplicaState]
    GONE: _ClassVar[ReplicaState]
REPLICA_STATE_UNSPECIFIED: ReplicaState
STARTING: ReplicaState
WARMING: ReplicaState
READY: ReplicaState
DRAINING: ReplicaState
GONE: ReplicaState

class Contract(_message.Message):
    __slots__ = ("model", "tokenizer", "dtype", "kv_cache_dtype", "mode", "max_model_len", "hash_algorithm", "hash_scheme", "block_size", "served_model_name")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer: str
    dtype: str
    kv_cache_dtype: str
    mode: str
    max_model_len: int
    hash_algorithm: str
    hash_scheme: str
    block_size: int
    served_model_name: str
    def __init__(self, model: _Optional[str] = ..., tokenizer: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., mode: _Optional[str] = ..., max_model_len: _Optional[int] = ..., hash_algorithm: _Optional[str] = ..., hash_scheme: _Optional[str] = ..., block_size: _Optional[int] = ..., served_model_name: _Optional[str] = ...) -> None: ...

class ReplicaLease(_message.Message):
    __slots__ = ("replica", "generation", "heartbeat", "protocol_version", "address", "state", "contract", "limits", "load", "cache", "heartbeat_ms", "lease_ms", "fault", "loras")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    generation: str
    heartbeat: int
    protocol_version: int
    address: str
    state: ReplicaState
    contract: Contract
    limits: Limits
    load: Load
    cache: CacheState
    heartbeat_ms: int
    lease_ms: int
    fault: str
    loras: _containers.RepeatedCompositeFieldContainer[LoadedLora]
    def __init__(self, replica: _Optional[str] = ..., generation: _Optional[str] = ..., heartbeat: _Optional[int] = ..., protocol_version: _Optional[int] = ..., address: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., contract: _Optional[_Union[Contract, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., cache: _Optional[_Union[CacheState, _Mapping]] = ..., heartbeat_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., fault: _Optional[str] = ..., loras: _Optional[_Iterable[_Union[LoadedLora, _Mapping]]] = ...) -> None: ...

class LoadedLora(_message.Message):
    __slots__ = ("name", "version", "rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    rank: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_queue")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue: int
    def __init__(self, max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_queue: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("waiting", "running", "waiting_tokens", "prefill_tokens_per_s", "hung_s")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    HUNG_S_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    waiting_tokens: int
    prefill_tokens_per_s: float
    hung_s: float
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., hung_s: _Optional[float] = ...) -> None: ...

class CacheState(_message.Message):
    __slots__ = ("prefix_caching", "last_seq", "kv_blocks", "kv_blocks_used", "kv_blocks_cached", "resident_hashes", "kv_bytes_per_token", "lru_age_s", "hit_rate_1m", "hit_rate_1h", "hit_rate", "token_reuse", "hit_rate_verdict", "host_kv_blocks", "host_kv_blocks_cached", "host_tokens_per_s", "host_hit_rate_1h")
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_HASHES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LRU_AGE_S_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_1M_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_1H_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REUSE_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_VERDICT_FIELD_NUMBER: _ClassVar[int]
    HOST_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_RATE_1H_FIELD_NUMBER: _ClassVar[int]
    prefix_caching: bool
    last_seq: int
    kv_blocks: int
    kv_blocks_used: int
    kv_blocks_cached: int
    resident_hashes: int
    kv_bytes_per_token: int
    lru_age_s: float
    hit_rate_1m: float
    hit_rate_1h: float
    hit_rate: float
    token_reuse: bool
    hit_rate_verdict: str
    host_kv_blocks: int
    host_kv_blocks_cached: int
    host_tokens_per_s: float
    host_hit_rate_1h: float
    def __init__(self, prefix_caching: bool = ..., last_seq: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., resident_hashes: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., lru_age_s: _Optional[float] = ..., hit_rate_1m: _Optional[float] = ..., hit_rate_1h: _Optional[float] = ..., hit_rate: _Optional[float] = ..., token_reuse: bool = ..., hit_rate_verdict: _Optional[str] = ..., host_kv_blocks: _Optional[int] = ..., host_kv_blocks_cached: _Optional[int] = ..., host_tokens_per_s: _Optional[float] = ..., host_hit_rate_1h: _Optional[float] = ...) -> None: ...

class CacheExplanation(_message.Message):
    __slots__ = ("reason", "cached_tokens", "coming_tokens", "evicted_ago_s", "idle_s", "removal_reason", "evicted_for")
    REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_AGO_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    REMOVAL_REASON_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FOR_FIELD_NUMBER: _ClassVar[int]
    reason: str
    cached_tokens: int
    coming_tokens: int
    evicted_ago_s: float
    idle_s: float
    removal_reason: str
    evicted_for: str
    def __init__(self, reason: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., coming_tokens: _Optional[int] = ..., evicted_ago_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., removal_reason: _Optional[str] = ..., evicted_for: _Optional[str] = ...) -> None: ...
