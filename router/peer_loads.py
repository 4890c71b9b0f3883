"""What the other routers have in flight: their totals and the steps after them, kept in this router's ``LoadBook``.

Plain bookkeeping with the clock passed in; ``router.shared_load`` carries it over Redis. A router's steps are numbered,
and its totals say after which step they stand, so a share is the newest totals plus the steps after them. Nothing that
is lost, doubled or late does harm for longer than until the next totals.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from warmfront_pb.v1 import router_pb2

from router.load import NO_SHARE, LoadBook, ReplicaLoad, Share, Step
from router.pending import Piece

_PENDING_TIMEOUT_S = 60.0  # blocks of a request whose end was never heard of
_MAX_PENDING = 16_384  # requests of one router
_MAX_STEPS = 16_384  # kept until the next totals
_MAX_KEYS = 8192  # of one request that are told


class _Peer:
    __slots__ = ("boot", "pending", "seq", "shares", "steps", "totals_seq")

    def __init__(self, boot: str) -> None:
        self.boot = boot
        self.totals_seq = 0
        self.seq = 0  # of the last step taken
        self.shares: dict[str, Share] = {}
        self.steps: deque[tuple[int, str, Share]] = deque(maxlen=_MAX_STEPS)  # after the totals
        self.pending: dict[int, tuple[float, ReplicaLoad, Piece]] = {}


class PeerLoads:
    """Adds the other routers' load to ``loads``. ``router`` and ``boot`` are this router's own: its own are skipped."""

    def __init__(self, loads: LoadBook, router: str, boot: str) -> None:
        self._loads = loads
        self._router = router
        self._boot = boot
        self._peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def has_work(self) -> bool:
        """Whether any of the others has sent requests to replicas since it started."""
        return any(peer.seq or peer.totals_seq for peer in self._peers.values())

    def observe(self, totals: Mapping[str, router_pb2.RouterLoad], now: float) -> None:
        """The totals of all routers that are alive: whoever is absent has gone, and its share with it."""
        for router in self._peers.keys() - totals.keys():
            self._forget(router, now)
        for router, load in totals.items():
            if router != self._router:
                self._rebase(router, load, now)

    def take(self, batch: router_pb2.DispatchBatch, now: float) -> None:
        """Steps of one router, in their order."""
        if batch.router == self._router:
            return
        peer = self._peer(batch.router, batch.boot, now)
        if peer is None:
            return
        for step in batch.steps:
            self._expect(peer, step, now)
            if step.seq <= peer.seq or step.seq <= peer.totals_seq:
                continue
            peer.seq = step.seq
            change = Share(step.in_flight, step.waiting_requests, step.waiting_tokens)
            peer.steps.append((step.seq, step.replica, change))
            has_progressed = change.waiting_requests < 0 and not step.ended
            self._set(batch.router, peer, step.replica, change, now, has_progressed)

    def clear(self, now: float) -> None:
        """Nothing can be heard of the others: this router's own counts remain."""
        for router in list(self._peers):
            self._forget(router, now)

    def _peer(self, router: str, boot: str, now: float) -> _Peer | None:
        """None for a boot that has been followed by another one."""
        peer = self._peers.get(router)
        if peer is not None and boot < peer.boot:
            return None
        if peer is None or boot > peer.boot:
            self._forget(router, now)
            peer = self._peers[router] = _Peer(boot)
        return peer

    def _rebase(self, router: str, load: router_pb2.RouterLoad, now: float) -> None:
        peer = self._peer(router, load.boot, now)
        if peer is None or load.seq < peer.totals_seq:
            return
        peer.totals_seq = load.seq
        while peer.steps and peer.steps[0][0] <= load.seq:
            peer.steps.popleft()
        before = peer.shares
        peer.shares = {
            one.replica: Share(one.in_flight, one.waiting_requests, one.waiting_tokens) for one in load.replicas
        }
        for _, replica, change in peer.steps:
            peer.shares[replica] = peer.shares.get(replica, NO_SHARE).plus(change)
        for replica in before.keys() | peer.shares.keys():
            self._set(router, peer, replica, NO_SHARE, now)
        while peer.pending:
            ticket, (expires_s, replica_load, piece) = next(iter(peer.pending.items()))
            if expires_s > now and len(peer.pending) <= _MAX_PENDING:
                break
            del peer.pending[ticket]
            replica_load.settle(piece, None, (), now)

    def _set(
        self, router: str, peer: _Peer, replica: str, change: Share, now: float, has_progressed: bool = False
    ) -> None:
        share = peer.shares.get(replica, NO_SHARE).plus(change)
        if share == NO_SHARE:
            peer.shares.pop(replica, None)
        else:
            peer.shares[replica] = share
        # Where a charge was missed its release would count below nothing.
        seen = Share(max(0, share[0]), max(0, share[1]), max(0, share[2]))
        self._loads.set_share(router, replica, seen, now, has_progressed)

    def _expect(self, peer: _Peer, step: router_pb2.DispatchStep, now: float) -> None:
        """Its blocks are pending from its first step until its end, and then as those of our own requests."""
        if not step.ended:
            if step.keys and step.ticket == step.seq and step.ticket not in peer.pending:
                load = self._loads.of(step.replica)
                peer.pending[step.ticket] = (now + _PENDING_TIMEOUT_S, load, load.expect(unpack(step.keys)))
            return
        known = peer.pending.pop(step.ticket, None)
        if known is not None:
            _, load, piece = known
            load.settle(piece, step.event_seq or None, unpack(step.keys), now)

    def _forget(self, router: str, now: float) -> None:
        peer = self._peers.pop(router, None)
        if peer is None:
            return
        for replica in peer.shares:
            self._loads.set_share(router, replica, NO_SHARE, now)
        for _, load, piece in peer.pending.values():
            load.settle(piece, None, (), now)


def totals_of(loads: LoadBook, boot: str) -> router_pb2.RouterLoad:
    """This router's own part, after the last step of its journal."""
    assert loads.journal is not None
    message = router_pb2.RouterLoad(boot=boot, seq=loads.journal.seq)
    for replica, share in loads.own_shares().items():
        message.replicas.add(
            replica=replica,
            in_flight=share.in_flight,
            waiting_requests=share.waiting_requests,
            waiting_tokens=share.waiting_tokens,
        )
    return message


def batch_of(router: str, boot: str, steps: Iterable[Step]) -> router_pb2.DispatchBatch:
    """Steps as the other routers read them."""
    batch = router_pb2.DispatchBatch(router=router, boot=boot)
    for step in steps:
        batch.steps.add(
            seq=step.seq,
            ticket=step.ticket,
            replica=step.replica,
            in_flight=step.change.in_flight,
            waiting_requests=step.change.waiting_requests,
            waiting_tokens=step.change.waiting_tokens,
            keys=pack(step.keys[:_MAX_KEYS]),
            ended=step.ended,
            event_seq=step.event_seq,
        )
    return batch


def pack(keys: Sequence[int]) -> bytes:
    """Index keys as little-endian uint64."""
    packed = array("Q", keys)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes) -> array[int]:
    """The keys again; a broken last one is left out."""
    keys = array("Q", data[: len(data) // 8 * 8])
    if sys.byteorder != "little":
        keys.byteswap()
    return keys
