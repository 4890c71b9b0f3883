"""How long the engine's steps take: the speed it tells of, and when the step that runs must have hung.

Plain arithmetic with the clock passed in. The engine's thread calls ``began`` and ``ended``; anybody may ask.
"""

from __future__ import annotations

HUNG_AFTER_S = 5.0  # no step is taken for hung before
_HUNG_FACTOR = 10.0  # nor before it has lasted so many times what was expected of it
_UNKNOWN_LIMIT_S = 60.0  # the limit of the first steps: kernels may be compiled in them
_WEIGHT = 0.05  # of the newest step in what is learned


class StepTimes:
    """What steps took, and the one that runs."""

    def __init__(self, hung_after_s: float = HUNG_AFTER_S) -> None:
        self._hung_after_s = hung_after_s
        self._prefill_tokens = 0.0  # of the steps that had some, smoothed as their seconds are
        self._prefill_s = 0.0
        self._decode_s: float | None = None  # of the steps that had none
        self._num_prefill_tokens = 0  # of the step that runs
        self._limit_s = _UNKNOWN_LIMIT_S
        self._began_s: float | None = None

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second; 0 until some have been computed."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    def began(self, num_prefill_tokens: int, now: float) -> None:
        """A step begins that computes so many prompt tokens, 0 where it only decodes."""
        expected_s = self._expected_s(num_prefill_tokens)
        self._num_prefill_tokens = num_prefill_tokens
        self._limit_s = _UNKNOWN_LIMIT_S if expected_s is None else max(self._hung_after_s, _HUNG_FACTOR * expected_s)
        self._began_s = now

    def ended(self, seconds: float) -> None:
        """It has ended; ``seconds`` of it were spent computing."""
        self._began_s = None
        tokens = self._num_prefill_tokens
        if tokens:
            weight = _WEIGHT if self._prefill_s else 1.0
            self._prefill_tokens += weight * (tokens - self._prefill_tokens)
            self._prefill_s += weight * (seconds - self._prefill_s)
        elif self._decode_s is None:
            self._decode_s = seconds
        else:
            self._decode_s += _WEIGHT * (seconds - self._decode_s)

    def age_s(self, now: float) -> float:
        """For how long the step that runs has been running; 0 between steps."""
        began_s = self._began_s
        return 0.0 if began_s is None else max(0.0, now - began_s)

    def hung_s(self, now: float) -> float:
        """The same where that is far too long for what it computes, else 0."""
        age_s = self.age_s(now)
        return age_s if age_s > self._limit_s else 0.0

    def _expected_s(self, num_prefill_tokens: int) -> float | None:
        """None: no such step has ended yet."""
        if not num_prefill_tokens:
            return self._decode_s
        speed = self.prefill_tokens_per_s
        return (self._decode_s or 0.0) + num_prefill_tokens / speed if speed else None
