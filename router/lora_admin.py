"""Adapters by an operator's order: each replica reads the files from its own disk, and each says what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from warmfront_pb.v1 import admin_pb2

from cache.adapter import MAX_NAME_LENGTH
from router.errors import InvalidRequestError, NoReplicaReadyError, NotFoundError
from router.fleet import Fleet, Member
from router.worker_client import WorkerError

_LOAD_TIMEOUT_S = 300.0  # gigabytes, from a disk that is far away
_UNLOAD_TIMEOUT_S = 30.0
_MAX_PATH_BYTES = 4096  # PATH_MAX of Linux, where workers run
_OUTCOMES = {
    "INVALID_ARGUMENT": "refused",
    "UNIMPLEMENTED": "refused",
    "FAILED_PRECONDITION": "conflict",
    "NOT_FOUND": "not_loaded",
    "UNAVAILABLE": "unreachable",
    "DEADLINE_EXCEEDED": "unreachable",
}


class LoraAdmin:
    """Loads, unloads and lists."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def load(self, name: str, path: str, replica: str = "") -> admin_pb2.LoraResponse:
        """Let every replica load the folder at ``path``, or one. Raises ``RouterError``."""
        if not name or not path:
            missing = "path" if name else "name"
            raise InvalidRequestError(f"{missing} is missing: give the adapter's name and the path of its folder")
        _check_name(name)
        if len(path.encode()) > _MAX_PATH_BYTES:
            raise InvalidRequestError(
                f"path is longer than the {_MAX_PATH_BYTES} bytes that one may have", param="path"
            )

        async def load_on(member: Member) -> admin_pb2.ReplicaLora:
            answer = await member.client.load_lora(name, path, _LOAD_TIMEOUT_S)
            outcome = "already_loaded" if answer.was_loaded else "loaded"
            return admin_pb2.ReplicaLora(outcome=outcome, version=answer.lora.version, rank=answer.lora.rank)

        answers = await self._ask(replica, load_on)
        done = [one for one in answers if one.outcome in ("loaded", "already_loaded")]
        complete = len(done) == len(answers) and len({one.version for one in done}) == 1
        return admin_pb2.LoraResponse(complete=complete, replicas=answers)

    async def unload(self, name: str, replica: str = "") -> admin_pb2.LoraResponse:
        """Let every replica give an adapter up, or one. Raises ``NotFoundError`` where none of them had it."""
        _check_name(name)

        async def unload_on(member: Member) -> admin_pb2.ReplicaLora:
            answer = await member.client.unload_lora(name, _UNLOAD_TIMEOUT_S)
            return admin_pb2.ReplicaLora(
                outcome="unloaded", version=answer.lora.version, rank=answer.lora.rank, running=answer.running
            )

        answers = await self._ask(replica, unload_on)
        if all(one.outcome == "not_loaded" for one in answers):
            where = f"on replica {replica!r}" if replica else "on any replica"
            raise NotFoundError(f"lora: no adapter {name!r} is loaded {where}", param="name")
        complete = all(one.outcome in ("unloaded", "not_loaded") for one in answers)
        return admin_pb2.LoraResponse(complete=complete, replicas=answers)

    async def listed(self) -> admin_pb2.ListLorasResponse:
        """Those of the replicas that take requests, as their leases stand now."""
        await self._fleet.look_again()
        return admin_pb2.ListLorasResponse(loras=self._fleet.adapters.listed())

    async def _ask(
        self, replica: str, order: Callable[[Member], Awaitable[admin_pb2.ReplicaLora]]
    ) -> list[admin_pb2.ReplicaLora]:
        """What became of it on each, by name; this router's view is up to date afterwards."""
        members = self._fleet.members
        asked = [self._fleet.member(replica)] if replica else [members[name] for name in sorted(members)]
        if not asked:
            raise NoReplicaReadyError(self._fleet.why_not_ready())
        answers = await asyncio.gather(*(_outcome(member, order) for member in asked))
        await self._fleet.look_again()
        return answers


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME_LENGTH:  # it is not shown: it may have any length
        raise InvalidRequestError(f"name is longer than the {MAX_NAME_LENGTH} characters of an adapter's", param="name")


async def _outcome(
    member: Member, order: Callable[[Member], Awaitable[admin_pb2.ReplicaLora]]
) -> admin_pb2.ReplicaLora:
    try:
        answer = await order(member)
    except WorkerError as error:
        answer = admin_pb2.ReplicaLora(
            outcome=_OUTCOMES.get(error.status, "failed"), detail=f"{error.status}: {error.message}"
        )
    answer.replica = member.replica.id
    return answer
