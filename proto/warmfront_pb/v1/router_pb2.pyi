from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterLoad(_message.Message):
    __slots__ = ("boot", "seq", "replicas")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    boot: str
    seq: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaShare]
    def __init__(self, boot: _Optional[str] = ..., seq: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaShare, _Mapping]]] = ...) -> None: ...

class ReplicaShare(_message.Message):
    __slots__ = ("replica", "in_flight", "waiting_requests", "waiting_tokens")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    in_flight: int
    waiting_requests: int
    waiting_tokens: int
    def __init__(self, replica: _Optional[str] = ..., in_flight: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ...) -> None: ...

class DispatchBatch(_message.Message):
    __slots__ = ("router", "boot", "steps")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    router: str
    boot: str
    steps: _containers.RepeatedCompositeFieldContainer[DispatchStep]
    def __init__(self, router: _Optional[str] = ..., boot: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[DispatchStep, _Mapping]]] = ...) -> None: ...

class DispatchStep(_message.Message):
    __slots__ = ("seq", "ticket", "replica", "in_flight", "waiting_requests", "waiting_tokens", "keys", "ended", "event_seq")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    ticket: int
    replica: str
    in_flight: int
    waiting_requests: int
    waiting_tokens: int
    keys: bytes
    ended: bool
    event_seq: int
    def __init__(self, seq: _Optional[int] = ..., ticket: _Optional[int] = ..., replica: _Optional[str] = ..., in_flight: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., keys: _Optional[bytes] = ..., ended: bool = ..., event_seq: _Optional[int] = ...) -> None: ...
