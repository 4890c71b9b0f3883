"""A worker of the version before: it speaks protocol 1 and knows no call and no field that came later.

Protocol 1 has Generate, GetModel, Drain and ResetCache; adapters, host memory and ExplainCache came with 2.
"""

from __future__ import annotations

from typing import Any

import grpc
from warmfront_pb.v1 import common_pb2, worker_pb2

from tests.fakes.simulated_worker import SimulatedWorker, Spec

_CALLS = {
    "GetModel": (worker_pb2.GetModelRequest, worker_pb2.GetModelResponse),
    "Drain": (worker_pb2.DrainWorkerRequest, worker_pb2.DrainWorkerResponse),
    "ResetCache": (worker_pb2.ResetWorkerCacheRequest, worker_pb2.ResetWorkerCacheResponse),
}
_LATER_LEASE = ("loras",)
_LATER_CACHE = ("host_kv_blocks", "host_kv_blocks_cached", "host_tokens_per_s")
_LATER_REQUEST = ("lora_version",)


class PreviousWorker(SimulatedWorker):
    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.unknown_fields: list[str] = []  # that requests carried all the same

    def register(self, server: Any) -> None:
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                getattr(self, name), kinds[0].FromString, kinds[1].SerializeToString
            )
            for name, kinds in _CALLS.items()
        }
        handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
            self.Generate, self._read_request, lambda message: message.SerializeToString()
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("warmfront.v1.Worker", handlers),))

    def lease(self) -> common_pb2.ReplicaLease:
        lease = super().lease()
        lease.protocol_version = 1
        for field in _LATER_LEASE:
            lease.ClearField(field)  # type: ignore[arg-type]
        for field in _LATER_CACHE:
            lease.cache.ClearField(field)  # type: ignore[arg-type]
        return lease

    def _read_request(self, data: bytes) -> worker_pb2.WorkerGenerateRequest:
        request = worker_pb2.WorkerGenerateRequest.FromString(data)
        for field in _LATER_REQUEST:
            if getattr(request, field):
                self.unknown_fields.append(field)
            request.ClearField(field)  # type: ignore[arg-type]
        return request
