"""What replicas do until all of them are ready, as `up` tells it: from their leases and their logs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_NAMED = 4  # so many are told by name; of more, how many do the same
_STEP = re.compile(r"state=STARTING doing=\\?'([^'\\]+)\\?'(?: percent=(\d+))?")  # in a JSON line too


def step_of(state: str, log: str) -> str:
    """What a replica in ``state`` does, with the per cent that its log tells of a step which knows them."""
    if state != "STARTING":
        return state
    steps = _STEP.findall(log)
    if not steps:
        return "starting"
    what, percent = steps[-1]
    return f"{what} {percent} %" if percent else what


def summary(doing: Mapping[str, str]) -> str:
    """``doing`` of each replica in a line: ``1 of 3 replicas ready: w1 loading weights 40 %, w2 starting``."""
    rest = {name: what for name, what in doing.items() if what != "READY"}
    text = f"{len(doing) - len(rest)} of {len(doing)} replicas ready"
    if not rest:
        return text
    if len(rest) <= _NAMED:
        return f"{text}: {', '.join(f'{name} {what}' for name, what in rest.items())}"
    kinds = Counter(re.sub(r" \d+ %$", "", what) for what in rest.values())
    return f"{text}: {', '.join(f'{number} {kind}' for kind, number in kinds.most_common())}"
