"""A breaker per replica: after transport faults it keeps requests away for a while, then lets one try.

Only faults of the replica count, never a client's. Time is an argument, in seconds on one monotonic clock.
"""

_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 10.0


class Breaker:
    """Closed lets everything through; open nothing; after its pause one request at a time, whose fate decides."""

    __slots__ = ("_open_until_s", "_pause_s", "_probing")

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._open_until_s = 0.0
        self._probing = False

    @property
    def is_troubled(self) -> bool:
        """Not closed: its last answer was a failure."""
        return self._pause_s > 0

    def allows(self, now: float) -> bool:
        """Whether a request may go there now."""
        return not self._pause_s or (now >= self._open_until_s and not self._probing)

    def start(self) -> None:
        """A request goes there."""
        self._probing = self._pause_s > 0

    def succeeded(self) -> None:
        """It answered."""
        self._pause_s = 0.0
        self._probing = False

    def failed(self, now: float) -> None:
        """It did not; each failure in a row doubles the pause."""
        self._pause_s = min(_LAST_PAUSE_S, 2 * self._pause_s or _FIRST_PAUSE_S)
        self._open_until_s = now + self._pause_s
        self._probing = False

    def abandoned(self) -> None:
        """The request ended before it told anything of the replica."""
        self._probing = False
