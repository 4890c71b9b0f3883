"""The names of our keys in Redis, and what to do where one holds another type.

Then somebody else wrote there, and our commands fail until it is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisError, ResponseError


class FleetKeys:
    """The names of a fleet's keys. The braces put them all into one slot of a Redis cluster."""

    def __init__(self, fleet: str) -> None:
        self._prefix = f"wf:{{{fleet}}}:"
        self.contract = f"{self._prefix}contract"
        self.replicas = f"{self._prefix}replicas"
        self.hot = f"{self._prefix}hot"
        self.routers = f"{self._prefix}routers"
        self.dispatch = f"{self._prefix}dispatch"

    def hot_of(self, router: str) -> str:
        """The hottest prefixes that one boot of a router has served."""
        return f"{self.hot}:{router}"

    def load(self, router: str) -> str:
        """What this router has in flight; its lease."""
        return f"{self._prefix}load:{router}"

    def replica(self, replica: str) -> str:
        """Its lease."""
        return f"{self._prefix}replica:{replica}"

    def events(self, replica: str, generation: str) -> str:
        """Its stream of event batches."""
        return f"{self._prefix}events:{replica}:{generation}"

    def snapshot(self, replica: str, generation: str) -> str:
        """Its resident blocks, with the sequence number they stand at."""
        return f"{self._prefix}snapshot:{replica}:{generation}"

    def wanted(self, replica: str, generation: str) -> str:
        """Set by a router that needs a newer snapshot; the replica's next heartbeat takes it away and writes one."""
        return f"{self._prefix}wanted:{replica}:{generation}"


def is_wrong_type(error: BaseException) -> bool:
    """Whether a command failed because its key holds another type."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


async def wrong_types(client: Any, types: Mapping[str, str]) -> list[str]:
    """Those of the keys whose type is not the one given: string, zset, set or stream. Raises ``RedisError``."""
    wrong = []
    for key, wanted in types.items():
        found: bytes = await client.type(key)
        if found.decode() not in (wanted, "none"):
            wrong.append(key)
    return wrong


async def remove_wrong_types(client: Any, types: Mapping[str, str]) -> list[str]:
    """Delete these, so that their owner can write them anew; which they were. Empty when Redis does not answer."""
    try:
        wrong = await wrong_types(client, types)
        if wrong:
            await client.delete(*wrong)
    except (RedisError, OSError):
        return []
    return wrong
