"""When a router of a new fleet begins: not with the fleet's first replica, which would get all traffic alone.

The gate holds while a fleet comes up, and only then: once it is open it stays so, whatever dies later, and a router
that starts beside a fleet that has served finds it open. Plain data, the clock passed in.
"""

from collections.abc import Collection

from warmfront_pb.v1 import common_pb2

_LONGEST_S = 900.0  # with fewer replicas ready for so long, more will not come


class Gate:
    """Of one router; ``min_ready`` is how many ready replicas it waits for."""

    def __init__(self, min_ready: int) -> None:
        self._min_ready = min_ready
        self._since_s: float | None = None  # when a replica was first seen to be ready
        self._num_ready = 0
        self._is_open = False

    def observe(self, ready: Collection[common_pb2.CacheState], others_serve: bool, now: float) -> None:
        """Take one look: the caches of the ready replicas, and whether other routers of the fleet send them work."""
        self._num_ready = len(ready)
        if not ready:
            return
        if self._since_s is None:
            self._since_s = now
        has_served = others_serve or any(cache.hit_rate_1h > 0 for cache in ready)
        if len(ready) >= self._min_ready or has_served or now - self._since_s >= _LONGEST_S:
            self._is_open = True

    def why_closed(self) -> str:
        """Empty while it is open."""
        return "" if self._is_open else f"{self._num_ready} of {self._min_ready} replicas that a new fleet begins with"
