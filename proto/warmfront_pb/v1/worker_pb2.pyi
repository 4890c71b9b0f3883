from warmfront_pb.v1 import common_pb2 as _common_pb2
from warmfront_pb.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerGenerateRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "cache_salt", "priority", "lora", "retention", "synthetic", "tenant", "generation", "num_prior_output_tokens", "lora_version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_PRIOR_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LORA_VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: bytes
    sampling: _inference_pb2.SamplingParams
    cache_salt: str
    priority: int
    lora: str
    retention: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Retention]
    synthetic: bool
    tenant: str
    generation: str
    num_prior_output_tokens: int
    lora_version: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., lora: _Optional[str] = ..., retention: _Optional[_Iterable[_Union[_inference_pb2.Retention, _Mapping]]] = ..., synthetic: bool = ..., tenant: _Optional[str] = ..., generation: _Optional[str] = ..., num_prior_output_tokens: _Optional[int] = ..., lora_version: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("served_model_name", "tokenizer_json", "chat_template", "bos_token", "eos_token", "unk_token", "pad_token", "eos_token_ids", "max_model_len", "vocab_size", "defaults", "adds_bos", "contract")
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    UNK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAD_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    ADDS_BOS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    served_model_name: str
    tokenizer_json: str
    chat_template: str
    bos_token: str
    eos_token: str
    unk_token: str
    pad_token: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    vocab_size: int
    defaults: _inference_pb2.SamplingParams
    adds_bos: bool
    contract: _common_pb2.Contract
    def __init__(self, served_model_name: _Optional[str] = ..., tokenizer_json: _Optional[str] = ..., chat_template: _Optional[str] = ..., bos_token: _Optional[str] = ..., eos_token: _Optional[str] = ..., unk_token: _Optional[str] = ..., pad_token: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., defaults: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., adds_bos: bool = ..., contract: _Optional[_Union[_common_pb2.Contract, _Mapping]] = ...) -> None: ...

class GetReplicaRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetReplicaResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _common_pb2.ReplicaLease
    def __init__(self, lease: _Optional[_Union[_common_pb2.ReplicaLease, _Mapping]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: int
    def __init__(self, running: _Optional[int] = ...) -> None: ...

class ResetWorkerCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetWorkerCacheResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class LoadWorkerLoraRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadWorkerLoraResponse(_message.Message):
    __slots__ = ("lora", "was_loaded")
    LORA_FIELD_NUMBER: _ClassVar[int]
    WAS_LOADED_FIELD_NUMBER: _ClassVar[int]
    lora: _common_pb2.LoadedLora
    was_loaded: bool
    def __init__(self, lora: _Optional[_Union[_common_pb2.LoadedLora, _Mapping]] = ..., was_loaded: bool = ...) -> None: ...

class UnloadWorkerLoraRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadWorkerLoraResponse(_message.Message):
    __slots__ = ("lora", "running")
    LORA_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    lora: _common_pb2.LoadedLora
    running: int
    def __init__(self, lora: _Optional[_Union[_common_pb2.LoadedLora, _Mapping]] = ..., running: _Optional[int] = ...) -> None: ...

class ExplainCacheRequest(_message.Message):
    __slots__ = ("token_ids", "missing_key", "cache_salt", "lora", "lora_version")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_KEY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    LORA_VERSION_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    missing_key: int
    cache_salt: str
    lora: str
    lora_version: str
    def __init__(self, token_ids: _Optional[bytes] = ..., missing_key: _Optional[int] = ..., cache_salt: _Optional[str] = ..., lora: _Optional[str] = ..., lora_version: _Optional[str] = ...) -> None: ...
