"""A breaker per replica: after faults of it requests are kept away for a while, then one may try.

Only faults of the replica count, never a client's: a broken connection at once, an error it answered with once it has
come several times in a row, since it may be the request that is poison. A call that began before the breaker last
opened says nothing new, so what cuts many streams at once opens it once. Time is an argument, in seconds on one
monotonic clock.
"""

_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 10.0
_ERRORS_IN_A_ROW = 3


class Breaker:
    """Closed lets everything through; open nothing; after its pause one call at a time, whose fate decides."""

    __slots__ = ("_last", "_num_errors", "_open_until_s", "_opened_after", "_pause_s", "_probe")

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._open_until_s = 0.0
        self._last = 0  # calls are numbered from 1
        self._opened_after = 0  # the last call before it opened
        self._probe = 0  # the call whose fate is waited for; 0: none
        self._num_errors = 0  # in a row

    @property
    def is_troubled(self) -> bool:
        """Not closed."""
        return self._pause_s > 0

    def allows(self, now: float) -> bool:
        """Whether a call may go there now."""
        return not self._pause_s or (now >= self._open_until_s and not self._probe)

    def start(self) -> int:
        """A call goes there; its number, for what becomes of it."""
        self._last += 1
        if self._pause_s:
            self._probe = self._last
        return self._last

    def succeeded(self, call: int) -> None:
        """The replica answers it."""
        if call > self._opened_after:
            self._pause_s = 0.0
            self._probe = self._num_errors = 0

    def broke(self, call: int, now: float) -> None:
        """Nobody was there, or the connection broke."""
        if call > self._opened_after:
            self._open(now)

    def erred(self, call: int, now: float) -> None:
        """The replica answered with an error of its own."""
        if call > self._opened_after:
            self._num_errors += 1
            if self._pause_s or self._num_errors >= _ERRORS_IN_A_ROW:
                self._open(now)

    def abandoned(self, call: int) -> None:
        """It ended, or was given up, before it told anything of the replica."""
        if call == self._probe:
            self._probe = 0

    def _open(self, now: float) -> None:
        """Each time in a row doubles the pause."""
        self._pause_s = min(_LAST_PAUSE_S, 2 * self._pause_s or _FIRST_PAUSE_S)
        self._open_until_s = now + self._pause_s
        self._opened_after = self._last
        self._probe = self._num_errors = 0
