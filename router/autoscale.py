"""How many workers a fleet needs, by the work that waits in it. Plain functions and data, the clock passed in.

The signal is what a user feels: seconds of prefill that wait before a new request's own. A worker whose batch is full
of answers that grow counts as one worker's work too, else a fleet that only decodes would look idle.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from warmfront_pb.v1 import common_pb2

_UNKNOWN_TOKENS_PER_S = 4_000.0  # until an engine has learned its own speed
_HIT_RATE_MARGIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A fleet's load at one moment, by the leases of its READY workers."""

    num_ready: int = 0
    waiting_s: float = 0.0  # of prefill, over all of them
    work: float = 0.0  # in workers: for each the larger of waiting time / target and running / most that may run
    hit_rate_1m: float = 0.0
    hit_rate_1h: float = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds of prefill that wait per READY worker."""
        return self.waiting_s / self.num_ready if self.num_ready else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscale:
    """The bounds of an autoscaled fleet."""

    min: int
    max: int
    target_wait_s: float = 0.5  # seconds of prefill that may wait per worker
    up_window_s: float = 15.0  # a need must last so long before workers are added
    down_window_s: float = 300.0  # and so long before one is taken away

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(f"autoscale: min {self.min} and max {self.max}: 1 <= min <= max")
        if not self.target_wait_s > 0:
            raise ValueError(f"autoscale: target-wait {self.target_wait_s:g}s must be over 0")


def waiting_s(lease: common_pb2.ReplicaLease) -> float:
    """Seconds of prefill that wait in one worker."""
    speed = lease.load.prefill_tokens_per_s or _UNKNOWN_TOKENS_PER_S
    return float(lease.load.waiting_tokens / speed)


def signal_of(leases: Sequence[common_pb2.ReplicaLease], target_wait_s: float = 0.5) -> Signal:
    """The fleet's load; a worker that is not READY does no work for users."""
    ready = [lease for lease in leases if lease.state == common_pb2.READY]
    if not ready:
        return Signal()
    waits = [waiting_s(lease) for lease in ready]
    asked = [lease.cache for lease in ready if lease.cache.HasField("hit_rate_1m")]  # in the last minute
    return Signal(
        num_ready=len(ready),
        waiting_s=sum(waits),
        work=sum(
            max(wait / target_wait_s, min(1.0, lease.load.running / max(1, lease.limits.max_num_seqs)))
            for lease, wait in zip(ready, waits, strict=True)
        ),
        hit_rate_1m=sum(cache.hit_rate_1m for cache in asked) / max(1, len(asked)),
        hit_rate_1h=sum(cache.hit_rate_1h for cache in asked) / max(1, len(asked)),
    )


@dataclass(slots=True)
class Autoscaler:
    """Turns signals into a count that does not flutter."""

    count: int
    _needs: deque[tuple[float, int]] = field(default_factory=deque)  # when, and how many workers the signal asked for

    def observe(self, signal: Signal, bounds: Autoscale, now: float) -> int:
        """Take one look; how many workers there should be.

        More as soon as every look of the up window asked for more, to the least that all of them asked for. One fewer
        when every look of the down window asked for fewer, never while hits fall: fewer caches would hold even less.
        """
        need = max(bounds.min, min(bounds.max, math.ceil(signal.work - 1e-9)))
        self.count = max(bounds.min, min(bounds.max, self.count))
        self._needs.append((now, need))
        longest_s = max(bounds.up_window_s, bounds.down_window_s)
        while len(self._needs) > 1 and self._needs[1][0] <= now - longest_s:
            self._needs.popleft()
        if signal.num_ready == 0:  # nobody serves yet: nothing is known of the load
            self._needs.clear()
            return self.count
        if (least := self._over(bounds.up_window_s, now, min)) is not None and least > self.count:
            self.count = least
            return self.count
        hits_fall = signal.hit_rate_1m < signal.hit_rate_1h - _HIT_RATE_MARGIN
        most = self._over(bounds.down_window_s, now, max)
        if most is not None and most < self.count and not hits_fall:
            self.count -= 1
            self._needs.clear()  # the next one waits for a window of its own
        return self.count

    def _over(self, window_s: float, now: float, pick: Callable[[list[int]], int]) -> int | None:
        """The least or most that was asked for in a window; None while less than a window has been seen."""
        if not self._needs or self._needs[0][0] > now - window_s:
            return None
        inside = [need for at_s, need in self._needs if at_s >= now - window_s]
        return pick(inside)
