"""A worker actor with nothing in it but a gRPC health service, which can be told to hang."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import ray
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from ray.actor import exit_actor

from router.controller import WorkerSpec


class RayWorker:
    def __init__(self, needs: str | None = None, starts_s: float = 0, loads_s: float = 0) -> None:
        time.sleep(starts_s)
        if needs is not None and not Path(needs).exists():
            raise FileNotFoundError(needs)
        self._server = grpc.server(ThreadPoolExecutor(2))
        servicer = health.HealthServicer()
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        serving = (servicer.set, ("", health_pb2.HealthCheckResponse.SERVING))
        threading.Timer(loads_s, *serving).start()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def ping(self) -> dict[str, Any]:
        return {"address": self._address, "pid": os.getpid()}

    def hang(self) -> None:
        time.sleep(3600)

    def drain(self) -> None:
        self._server.stop(None)
        exit_actor()


def launch(spec: WorkerSpec) -> Any:
    options = {"name": spec.name, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0, "get_if_exists": True}
    return ray.remote(RayWorker).options(**options).remote(**spec.settings)
