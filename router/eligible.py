"""Who can take a request now, and why the other ready replicas cannot."""

from __future__ import annotations

from collections.abc import Mapping

from warmfront_pb.v1 import worker_pb2

from router.errors import NoReplicaReadyError, NotFoundError, RouterError
from router.explain import Absence
from router.fleet import Fleet, Member
from router.lora import Caches, adapter_of, no_adapter

RETRY_AFTER_S = 1.0
_FAILING = Absence("READY", "failing", "its last calls failed: it is left alone for some seconds")


class Eligible:
    """The fleet as one request may use it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._troubled: set[Member] = set()  # whose breaker is not closed

    def has_failed(self, member: Member) -> None:
        """Its breaker may have opened."""
        if member.breaker.is_troubled:
            self._troubled.add(member)

    def holders(self, call: worker_pb2.WorkerGenerateRequest) -> Caches:
        """The ready replicas that could answer this request: those that have its adapter, or all."""
        adapter = adapter_of(call)
        return self._fleet.ready_caches if adapter is None else self._fleet.adapters.caches(adapter)

    def find(
        self, call: worker_pb2.WorkerGenerateRequest, excluded: Mapping[str, Absence], now: float
    ) -> tuple[Caches, Mapping[str, Absence]]:
        """Those of them that have not failed this request; those that fail or hang only where there is nobody else.

        And the other ready ones, with the reason.
        """
        caches = self.holders(call)
        if excluded:
            caches = {name: cache for name, cache in caches.items() if name not in excluded}
        passed_over = dict(excluded)
        if (adapter := adapter_of(call)) is not None:
            holders = self._fleet.adapters.caches(adapter)
            passed_over |= {
                name: no_adapter(adapter)
                for name in self._fleet.ready_caches
                if name not in holders and name not in excluded
            }
        if (avoided := self._avoided(now)) and (sound := _without(caches, avoided)):
            passed_over |= {name: avoided[name] for name in caches if name in avoided}
            caches = sound
        return caches, passed_over

    def has_other(self, call: worker_pb2.WorkerGenerateRequest, excluded: Mapping[str, Absence], now: float) -> bool:
        """Whether there is one that has not failed this request, does not fail and does not hang."""
        return bool(_without(_without(self.holders(call), excluded), self._avoided(now)))

    def nobody(self, call: worker_pb2.WorkerGenerateRequest) -> RouterError:
        """Why none can take a request, though it was taken in."""
        if self._fleet.ready and not self.holders(call):
            return NotFoundError(f"lora: adapter {call.lora!r} is not loaded any more", param="lora")
        why = self._fleet.why_not_ready() or "every ready replica that could answer this request has failed it"
        return NoReplicaReadyError(f"{why}: retry soon", retry_after_s=RETRY_AFTER_S)

    def _avoided(self, now: float) -> Mapping[str, Absence]:
        hung = self._fleet.hung
        if not self._troubled:
            return hung
        self._troubled = {one for one in self._troubled if one.breaker.is_troubled and not one.client.is_closed}
        return {one.replica.id: _FAILING for one in self._troubled if not one.breaker.allows(now)} | hung


def _without(caches: Caches, others: Mapping[str, Absence]) -> Caches:
    return {name: cache for name, cache in caches.items() if name not in others}
