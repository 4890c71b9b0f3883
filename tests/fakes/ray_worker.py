"""A worker actor with nothing in it but a gRPC health service, which can be told to hang."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from ray.actor import exit_actor

from router.launcher import Desired
from warmfront.actors import RayLauncher


class RayWorker:
    """Its settings: ``needs`` a file, ``starts_s`` and ``loads_s`` take their time, ``fault`` is its last word."""

    def __init__(self, make_settings: Callable[[], Mapping[str, Any]]) -> None:
        settings = make_settings()
        time.sleep(settings.get("starts_s", 0))
        if not Path(settings.get("needs", "/")).exists():
            raise FileNotFoundError(settings["needs"])
        self._fault = settings.get("fault", "")
        self._is_hung = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._health = health.HealthServicer()
        self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        self._state = "STARTING"
        timer = threading.Timer(settings.get("loads_s", 0), self._be_ready)
        timer.daemon = True
        timer.start()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def ping(self) -> dict[str, Any]:
        if self._is_hung.is_set():
            time.sleep(3600)
        state = "GONE" if self._fault else self._state
        return {"address": self._address, "pid": os.getpid(), "state": state, "fault": self._fault, "exit_code": 1}

    def hang(self) -> None:
        self._is_hung.set()

    def drain(self, deadline_s: float = 0) -> None:
        self._server.stop(None)
        exit_actor()

    def _be_ready(self) -> None:
        if not self._fault:
            self._state = "READY"
            self._health.set("", health_pb2.HealthCheckResponse.SERVING)


def settings_of(name: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return settings


def launcher(desired: Desired) -> RayLauncher:
    return RayLauncher(desired, {"worker": (RayWorker, settings_of)})
