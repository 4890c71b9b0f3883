from warmfront_pb.v1 import common_pb2 as _common_pb2
from warmfront_pb.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListReplicasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReplicasResponse(_message.Message):
    __slots__ = ("fleet", "replicas", "queue")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    fleet: str
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    queue: Queue
    def __init__(self, fleet: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., queue: _Optional[_Union[Queue, _Mapping]] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("requests", "tokens", "oldest_s", "tenants", "tokens_per_s", "full_replicas")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    FULL_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    tokens: int
    oldest_s: float
    tenants: int
    tokens_per_s: float
    full_replicas: int
    def __init__(self, requests: _Optional[int] = ..., tokens: _Optional[int] = ..., oldest_s: _Optional[float] = ..., tenants: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., full_replicas: _Optional[int] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("lease", "lease_age_s", "index_blocks", "inflight_tokens", "inflight_requests", "restarts")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    INDEX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    lease: _common_pb2.ReplicaLease
    lease_age_s: float
    index_blocks: int
    inflight_tokens: int
    inflight_requests: int
    restarts: int
    def __init__(self, lease: _Optional[_Union[_common_pb2.ReplicaLease, _Mapping]] = ..., lease_age_s: _Optional[float] = ..., index_blocks: _Optional[int] = ..., inflight_tokens: _Optional[int] = ..., inflight_requests: _Optional[int] = ..., restarts: _Optional[int] = ...) -> None: ...

class DrainReplicaRequest(_message.Message):
    __slots__ = ("replica", "deadline_ms")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    deadline_ms: int
    def __init__(self, replica: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class DrainReplicaResponse(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: int
    def __init__(self, running: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request", "request_id", "last")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.GenerateRequest
    request_id: str
    last: int
    def __init__(self, request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., request_id: _Optional[str] = ..., last: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("explanations",)
    EXPLANATIONS_FIELD_NUMBER: _ClassVar[int]
    explanations: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, explanations: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("request_id", "decided_at_s", "policy", "chosen", "reason", "prompt_tokens", "full_blocks", "block_size", "retries", "cached_tokens", "ttft_s", "replicas", "left_out", "queue_s", "cache")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FULL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decided_at_s: float
    policy: str
    chosen: str
    reason: str
    prompt_tokens: int
    full_blocks: int
    block_size: int
    retries: int
    cached_tokens: int
    ttft_s: float
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaExplanation]
    left_out: int
    queue_s: float
    cache: _common_pb2.CacheExplanation
    def __init__(self, request_id: _Optional[str] = ..., decided_at_s: _Optional[float] = ..., policy: _Optional[str] = ..., chosen: _Optional[str] = ..., reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., full_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., retries: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., replicas: _Optional[_Iterable[_Union[ReplicaExplanation, _Mapping]]] = ..., left_out: _Optional[int] = ..., queue_s: _Optional[float] = ..., cache: _Optional[_Union[_common_pb2.CacheExplanation, _Mapping]] = ...) -> None: ...

class ReplicaExplanation(_message.Message):
    __slots__ = ("replica", "state", "reason", "detail", "device_blocks", "host_blocks", "pending_blocks", "matched_tokens", "waiting_tokens", "waiting_requests", "in_flight", "predicted_ttft_s", "wait_s", "miss_s", "displaced_s", "cost_s", "delayed_s")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MISS_S_FIELD_NUMBER: _ClassVar[int]
    DISPLACED_S_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    DELAYED_S_FIELD_NUMBER: _ClassVar[int]
    replica: str
    state: str
    reason: str
    detail: str
    device_blocks: int
    host_blocks: int
    pending_blocks: int
    matched_tokens: int
    waiting_tokens: float
    waiting_requests: int
    in_flight: int
    predicted_ttft_s: float
    wait_s: float
    miss_s: float
    displaced_s: float
    cost_s: float
    delayed_s: float
    def __init__(self, replica: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., device_blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ..., pending_blocks: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., waiting_tokens: _Optional[float] = ..., waiting_requests: _Optional[int] = ..., in_flight: _Optional[int] = ..., predicted_ttft_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., miss_s: _Optional[float] = ..., displaced_s: _Optional[float] = ..., cost_s: _Optional[float] = ..., delayed_s: _Optional[float] = ...) -> None: ...

class ResetCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetCacheResponse(_message.Message):
    __slots__ = ("complete", "replicas")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaReset]
    def __init__(self, complete: bool = ..., replicas: _Optional[_Iterable[_Union[ReplicaReset, _Mapping]]] = ...) -> None: ...

class ReplicaReset(_message.Message):
    __slots__ = ("replica", "outcome", "blocks", "detail")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    replica: str
    outcome: str
    blocks: int
    detail: str
    def __init__(self, replica: _Optional[str] = ..., outcome: _Optional[str] = ..., blocks: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class LoadLoraRequest(_message.Message):
    __slots__ = ("name", "path", "replica")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replica: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replica: _Optional[str] = ...) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("name", "replica")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    name: str
    replica: str
    def __init__(self, name: _Optional[str] = ..., replica: _Optional[str] = ...) -> None: ...

class LoraResponse(_message.Message):
    __slots__ = ("complete", "replicas")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaLora]
    def __init__(self, complete: bool = ..., replicas: _Optional[_Iterable[_Union[ReplicaLora, _Mapping]]] = ...) -> None: ...

class ReplicaLora(_message.Message):
    __slots__ = ("replica", "outcome", "version", "rank", "running", "detail")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    replica: str
    outcome: str
    version: str
    rank: int
    running: int
    detail: str
    def __init__(self, replica: _Optional[str] = ..., outcome: _Optional[str] = ..., version: _Optional[str] = ..., rank: _Optional[int] = ..., running: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class ListLorasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasResponse(_message.Message):
    __slots__ = ("loras",)
    LORAS_FIELD_NUMBER: _ClassVar[int]
    loras: _containers.RepeatedCompositeFieldContainer[Lora]
    def __init__(self, loras: _Optional[_Iterable[_Union[Lora, _Mapping]]] = ...) -> None: ...

class Lora(_message.Message):
    __slots__ = ("name", "version", "rank", "replicas", "served")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    rank: int
    replicas: _containers.RepeatedScalarFieldContainer[str]
    served: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., rank: _Optional[int] = ..., replicas: _Optional[_Iterable[str]] = ..., served: bool = ...) -> None: ...
