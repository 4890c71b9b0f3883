"""Keys of ours that hold another type: somebody else wrote there, and our commands fail until they are gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisError, ResponseError


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
