"""What an operator asks of a router; the HTTP and gRPC fronts answer the same."""

import asyncio
from typing import Any

from warmfront_pb.v1 import admin_pb2, common_pb2

from common.protocol import PROTOCOL_VERSION
from router.dispatch import Dispatcher
from router.errors import InvalidRequestError, NoReplicaReadyError
from router.fleet import Fleet, Member
from router.worker_client import WorkerError

_DRAIN_TIMEOUT_S = 5.0
_RESET_TIMEOUT_S = 5.0
_FAILING = "the last call to it from this router failed: it gets one at a time until one succeeds"
_OUTCOMES = {"FAILED_PRECONDITION": "busy", "UNAVAILABLE": "unreachable", "DEADLINE_EXCEEDED": "unreachable"}


class Admin:
    """Views of the fleet and orders to it."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher

    def replicas(self) -> admin_pb2.ListReplicasResponse:
        """Every replica that this router knows, refused ones with the reason as their fault."""
        response = admin_pb2.ListReplicasResponse(fleet=self._fleet.config.fleet)
        for name in sorted(self._fleet.members):
            response.replicas.append(self._replica(self._fleet.members[name]))
        queue = self._dispatcher.queue
        response.queue.requests = len(queue)
        response.queue.tokens = queue.num_tokens
        response.queue.oldest_s = queue.oldest_s
        response.queue.tenants = queue.num_tenants
        response.queue.tokens_per_s = queue.tokens_per_s if queue else 0.0
        response.queue.full_replicas = len(self._fleet.full())
        return response

    def replicas_json(self) -> dict[str, Any]:
        """The same as the object of ``GET /v1/replicas``."""
        listed = self.replicas()
        queue = {
            "requests": listed.queue.requests,
            "tokens": listed.queue.tokens,
            "oldest_s": round(listed.queue.oldest_s, 3),
            "tenants": listed.queue.tenants,
            "tokens_per_s": round(listed.queue.tokens_per_s, 1),
            "full_replicas": listed.queue.full_replicas,
        }
        replicas = [_replica_json(one) for one in listed.replicas]
        return {
            "fleet": listed.fleet,
            "protocol_version": PROTOCOL_VERSION,
            "replicas": replicas,
            "queue": queue,
        }

    async def drain(self, replica: str, deadline_ms: int = 0) -> int:
        """Let a replica end its requests and leave; how many it still answers. Raises ``RouterError``."""
        if not replica:
            raise InvalidRequestError("replica is missing: name the one to drain", param="replica")
        member = self._fleet.member(replica)
        try:
            return await member.client.drain(deadline_ms, _DRAIN_TIMEOUT_S)
        except WorkerError as error:
            raise error.as_router_error(f"replica {replica}") from error

    async def reset_cache(self) -> admin_pb2.ResetCacheResponse:
        """Let every replica forget its cached blocks, and say which did. Raises ``NoReplicaReadyError`` for none.

        The index follows by the replicas' own events, here and in every other router.
        """
        members = [self._fleet.members[name] for name in sorted(self._fleet.members)]
        if not members:
            raise NoReplicaReadyError(self._fleet.why_not_ready())
        resets = await asyncio.gather(*map(_reset, members))
        complete = all(reset.outcome == "reset" for reset in resets)
        return admin_pb2.ResetCacheResponse(complete=complete, replicas=resets)

    def _replica(self, member: Member) -> admin_pb2.Replica:
        load = self._fleet.loads.of(member.replica.id).own
        one = admin_pb2.Replica(
            lease=member.replica.lease,
            lease_age_s=self._fleet.membership.lease_age_s(member.replica),
            index_blocks=self._fleet.index.num_blocks(member.replica.id),
            inflight_tokens=load.waiting_tokens,
            inflight_requests=load.in_flight,
            restarts=member.replica.restarts,
        )
        one.lease.state = member.state
        hung = self._fleet.hung.get(member.replica.id)
        failing = _FAILING if member.breaker.is_troubled else ""
        fault = member.replica.fault or (hung.detail if hung else "") or member.fault or one.lease.fault
        one.lease.fault = fault or failing
        return one


async def _reset(member: Member) -> admin_pb2.ReplicaReset:
    name = member.replica.id
    try:
        return admin_pb2.ReplicaReset(
            replica=name, outcome="reset", blocks=await member.client.reset_cache(_RESET_TIMEOUT_S)
        )
    except WorkerError as error:
        outcome = _OUTCOMES.get(error.status, "failed")
        return admin_pb2.ReplicaReset(replica=name, outcome=outcome, detail=f"{error.status}: {error.message}")


def _replica_json(one: admin_pb2.Replica) -> dict[str, Any]:
    lease = one.lease
    cache, load, contract = lease.cache, lease.load, lease.contract
    return {
        "id": lease.replica,
        "generation": lease.generation,
        "state": common_pb2.ReplicaState.Name(lease.state),
        "address": lease.address,
        "model": contract.served_model_name,
        "mode": contract.mode,
        "block_size": contract.block_size,
        "hash_algorithm": contract.hash_algorithm,
        "protocol_version": lease.protocol_version,
        "max_model_len": lease.limits.max_model_len,
        "prefix_caching": cache.prefix_caching,
        "kv_blocks": cache.kv_blocks,
        "kv_blocks_used": cache.kv_blocks_used,
        "kv_blocks_cached": cache.kv_blocks_cached,
        "host_kv_blocks": cache.host_kv_blocks,
        "host_kv_blocks_cached": cache.host_kv_blocks_cached,
        "host_tokens_per_s": round(cache.host_tokens_per_s),
        "kv_bytes_per_token": cache.kv_bytes_per_token,
        "lru_age_s": round(cache.lru_age_s, 3),
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "running": load.running,
        "prefill_tokens_per_s": round(load.prefill_tokens_per_s, 1),
        "hit_rate_1m": round(cache.hit_rate_1m, 4) if cache.HasField("hit_rate_1m") else None,
        "hit_rate_1h": round(cache.hit_rate_1h, 4),
        "host_hit_rate_1h": round(cache.host_hit_rate_1h, 4),
        "hit_rate": round(cache.hit_rate, 4),
        "hit_rate_verdict": cache.hit_rate_verdict,
        "lease_age_s": round(one.lease_age_s, 3),
        "index_blocks": one.index_blocks,
        "inflight_tokens": one.inflight_tokens,
        "inflight_requests": one.inflight_requests,
        "restarts": one.restarts,
        "loras": [{"name": lora.name, "version": lora.version, "rank": lora.rank} for lora in lease.loras],
        "fault": lease.fault,
    }
