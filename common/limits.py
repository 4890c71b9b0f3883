"""What a request may ask for, and what it gets where it does not say: the same in the router and in the worker."""

from __future__ import annotations

from array import array
from typing import NamedTuple

MAX_MESSAGE_BYTES = 64 << 20  # between router and worker: 16 million token ids, or a large tokenizer.json
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 250_000  # of all prompt tokens: they are one message, of 4 to 8 MB, made in 0.4 s
MAX_LOGIT_BIASES = 1024
MAX_SALT_CHARS = 256
MAX_RETENTIONS = 4
RETENTION_TTLS_S = (300, 3600)


class Range(NamedTuple):
    """Values from ``low`` to ``high``; ``low`` itself too unless it is ``open``."""

    low: float
    high: float
    open: bool = False

    def allows(self, value: float) -> bool:
        """Whether it lies there; a NaN lies nowhere."""
        return self.low <= value <= self.high and not (self.open and value == self.low)

    def __str__(self) -> str:
        return f"{'over ' if self.open else ''}{self.low:g} to {self.high:g}"


def fault_of_prompt_logprobs(num_tokens: int, num_alternatives: int) -> str:
    """Why those of so many prompt tokens are too many; empty where they are not."""
    count = num_tokens * (1 + num_alternatives)
    if count <= MAX_PROMPT_LOGPROBS:
        return ""
    each = f"{num_tokens} prompt tokens with {num_alternatives} alternatives each"
    return f"of {each} are {count}: ask for {MAX_PROMPT_LOGPROBS} at most"


RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(array("f", [0.01])[0], 10),  # as a message has it, in 32 bits
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
