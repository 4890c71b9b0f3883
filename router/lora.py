"""Which replicas have which LoRA adapter, and which of them a request means.

A request names an adapter; the router adds the version of its content, so that no replica answers with another one.
Where replicas hold different contents under one name, requests get the one that most of them have: a name's content
rolls over with the replicas, and every router decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from warmfront_pb.v1 import admin_pb2, common_pb2, inference_pb2, worker_pb2

from cache.adapter import Adapter
from router.errors import NotFoundError, RouterError
from router.explain import Absence
from router.request import model_not_found
from router.tokenizer import ModelProfile

Caches = Mapping[str, common_pb2.CacheState]  # of replicas, by their ids


class Adapters:
    """The adapters of the replicas that take requests. Never changes: the fleet replaces it."""

    def __init__(self, ready: Mapping[str, common_pb2.ReplicaLease]) -> None:
        self._caches: dict[Adapter, dict[str, common_pb2.CacheState]] = {}
        self._ranks: dict[Adapter, int] = {}
        for replica, lease in ready.items():
            for one in lease.loras:
                adapter = Adapter(one.name, one.version)
                self._caches.setdefault(adapter, {})[replica] = lease.cache
                self._ranks[adapter] = one.rank
        # Of the contents of one name the last one stays: that of most replicas, of the highest version among equals.
        by_popularity = sorted(self._caches, key=lambda one: (len(self._caches[one]), one.version))
        self._served = {adapter.name: adapter for adapter in by_popularity}

    @property
    def names(self) -> list[str]:
        """Those that requests may name."""
        return sorted(self._served)

    def named(self, name: str) -> Adapter | None:
        """What requests for ``name`` get."""
        return self._served.get(name)

    def caches(self, adapter: Adapter) -> Caches:
        """The ready replicas that hold this very content."""
        return self._caches.get(adapter, {})

    def listed(self) -> list[admin_pb2.Lora]:
        """All of them, by name."""
        return [
            admin_pb2.Lora(
                name=adapter.name,
                version=adapter.version,
                rank=self._ranks[adapter],
                replicas=sorted(self._caches[adapter]),
                served=self._served[adapter.name] == adapter,
            )
            for adapter in sorted(self._caches)
        ]


def adapter_of(call: worker_pb2.WorkerGenerateRequest) -> Adapter | None:
    """The one that a placed request is computed with."""
    return Adapter(call.lora, call.lora_version) if call.lora else None


def asked_name(request: inference_pb2.GenerateRequest, model: ModelProfile) -> str:
    """The adapter that a request names, by ``lora`` or, as OpenAI's clients can, by ``model``; empty: none.

    Raises ``NotFoundError`` where the two contradict each other.
    """
    if request.model in ("", model.name):
        return request.lora
    if request.lora not in ("", request.model):
        raise model_not_found(request.model, model.name)
    return request.model


def not_found(request: inference_pb2.GenerateRequest, name: str, model: ModelProfile, known: Adapters) -> RouterError:
    """For a request that names an adapter which no ready replica has."""
    if not request.lora:
        return model_not_found(name, model.name, known.names)
    listed = f"loaded: {', '.join(known.names)}" if known.names else "none is"
    return NotFoundError(f"lora: no adapter {name!r} is loaded; {listed}", param="lora")


def no_adapter(adapter: Adapter) -> Absence:
    """Why a ready replica cannot take a request."""
    return Absence("READY", "no_adapter", f"adapter {adapter.name!r} of version {adapter.version[:12]} is not loaded")
