"""One try of a request on one replica.

From its placing on it is charged: with load there, with room in this router, with a call of the replica's breaker.
``close`` takes all of that back, once, and is due on every way out, a client that leaves included.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from router.admission import Admission
from router.explain import Absence
from router.fleet import Member
from router.load import ReplicaLoad, Ticket
from router.peer_loads import unpack
from router.request import Work
from router.worker_client import HungError, WorkerError, WorkerStream

_PATIENCE_S = 5.0  # with a replica that gives nobody a first token
_PATIENCE = 10.0  # and so many times what all that waits there should take


class Attempt:
    """See the module. ``excluded`` are the replicas that have failed the request before."""

    def __init__(
        self,
        work: Work,
        excluded: Mapping[str, Absence],
        member: Member,
        load: ReplicaLoad,
        ticket: Ticket,
        work_tokens: int,
        queue: Admission[Attempt],
    ) -> None:
        self.work = work
        self.excluded = excluded
        self.member = member
        self.work_tokens = work_tokens  # that are computed for it there
        self.has_begun = False  # its first message has come
        self.may_leave = False  # the request can go on elsewhere, as it stands
        self._load = load
        self._ticket = ticket
        self._queue = queue
        self._breaker_call = member.breaker.start()
        self._stream: WorkerStream | None = None
        self._is_open = True
        queue.entered(work.num_tokens)

    def send(self, deadline_s: float, metadata: Sequence[tuple[str, str]]) -> WorkerStream:
        """Call the replica. Raises ``WorkerError``."""
        call = self.work.call
        call.generation = self.member.replica.generation
        timeout_s = max(0.001, deadline_s - time.monotonic())
        self._stream = self.member.client.generate(call.SerializeToString(), timeout_s, metadata)
        return self._stream

    def begin(self, now: float) -> None:
        """The first message is here: nobody waits for the prompt any more."""
        self.has_begun = True
        self._ticket.first_token(now)
        self._queue.look()
        self.member.breaker.succeeded(self._breaker_call)
        self.member.fault = ""

    async def finish(self) -> int | None:
        """The answer is whole: take what the replica tells at the end. Its cached tokens; None where it does not say.

        The blocks of the answer stay pending there until the replica's own events have told of them.
        """
        assert self._stream is not None
        trailing = await self._stream.trailing_metadata()
        event_seq = int(trailing.get("wf-event-seq", 0))
        output_keys = trailing.get("wf-output-keys-bin")
        self._ticket.close(time.monotonic(), event_seq, unpack(output_keys) if isinstance(output_keys, bytes) else ())
        self.member.breaker.succeeded(self._breaker_call)
        return int(trailing["wf-cached-tokens"]) if "wf-cached-tokens" in trailing else None

    def fail(self, failure: WorkerError, now: float) -> None:
        """It ended with this: what it says against the replica counts against it."""
        breaker = self.member.breaker
        is_late = failure.status == "DEADLINE_EXCEEDED" and not self.has_begun
        if failure.is_broken or (is_late and is_unheard(self._load, now)):
            breaker.broke(self._breaker_call, now)
        elif failure.is_error:
            breaker.erred(self._breaker_call, now)

    def leave(self, why: str) -> None:
        """The replica hangs and another one can take the request: whoever reads gets ``HungError``."""
        if self._stream is not None:
            self._stream.give_up(HungError(why))

    def close(self) -> None:
        """It is over; what is still charged is released. Twice is once."""
        if not self._is_open:
            return
        self._is_open = False
        if self._stream is not None:
            self._stream.cancel()
        self.member.breaker.abandoned(self._breaker_call)
        self._ticket.close(time.monotonic())
        self._queue.left(self.work.num_tokens)


def is_unheard(load: ReplicaLoad, now: float) -> bool:
    """Whether a replica gave nobody a first token for so long that it must be the replica, and not what waits there."""
    patience_s = max(_PATIENCE_S, _PATIENCE * load.waiting_tokens / load.speed)
    return load.since_progress_s(now) > patience_s
