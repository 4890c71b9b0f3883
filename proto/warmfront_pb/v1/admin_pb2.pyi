from warmfront_pb.v1 import common_pb2 as _common_pb2
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
    __slots__ = ("fleet", "replicas")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    fleet: str
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, fleet: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("lease", "lease_age_s", "index_blocks", "inflight_tokens", "inflight_requests")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    INDEX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    lease: _common_pb2.ReplicaLease
    lease_age_s: float
    index_blocks: int
    inflight_tokens: int
    inflight_requests: int
    def __init__(self, lease: _Optional[_Union[_common_pb2.ReplicaLease, _Mapping]] = ..., lease_age_s: _Optional[float] = ..., index_blocks: _Optional[int] = ..., inflight_tokens: _Optional[int] = ..., inflight_requests: _Optional[int] = ...) -> None: ...

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
