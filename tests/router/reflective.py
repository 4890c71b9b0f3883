"""A gRPC client that knows no .proto of ours: it learns messages and methods from the server, as grpcurl does."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc


class ReflectiveClient:
    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=(("grpc.max_receive_message_length", -1),))
        self._pool = descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    async def services(self) -> list[str]:
        reply = await self._ask(reflection_pb2.ServerReflectionRequest(list_services=""))
        return [service.name for service in reply.list_services_response.service]

    async def call(
        self, method: str, request: dict[str, Any], metadata: tuple[tuple[str, str], ...] = (), timeout: float = 30
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """All answers as JSON objects, and the trailing metadata."""
        service_name, _, method_name = method.rpartition("/")
        await self._load(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service_name))
        described = self._pool.FindServiceByName(service_name).FindMethodByName(method_name)
        encode = message_factory.GetMessageClass(described.input_type)
        decode = message_factory.GetMessageClass(described.output_type)
        stream: Any = self.channel.unary_stream(f"/{method}", response_deserializer=decode.FromString)(
            json_format.ParseDict(request, encode()).SerializeToString(), metadata=metadata, timeout=timeout
        )
        answers = [json_format.MessageToDict(answer) async for answer in stream]
        return answers, {str(key): str(value) for key, value in await stream.trailing_metadata()}

    async def _load(self, request: reflection_pb2.ServerReflectionRequest) -> None:
        reply = await self._ask(request)
        for data in reply.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name in self._known:
                continue
            self._known.add(file.name)
            for needed in file.dependency:
                await self._load(reflection_pb2.ServerReflectionRequest(file_by_filename=needed))
            self._pool.Add(file)

    async def _ask(self, request: reflection_pb2.ServerReflectionRequest) -> reflection_pb2.ServerReflectionResponse:
        call: Any = reflection_pb2_grpc.ServerReflectionStub(self.channel).ServerReflectionInfo()
        await call.write(request)
        reply: reflection_pb2.ServerReflectionResponse = await call.read()
        await call.done_writing()
        return reply
