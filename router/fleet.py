"""The fleet as the dispatcher uses it: members, their channels, their breakers, the index, the model.

One place applies what the registry and the index mirror learn, so that a generation that leaves is gone everywhere at
once: no candidate, no blocks in the index, no pending entries, its calls cancelled.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from warmfront_pb.v1 import common_pb2

from cache.block_hash import HashScheme
from cache.prefix_index import PrefixIndex
from common.redis_client import connect_redis
from common.redis_keys import FleetKeys
from common.worker_token import shown_token
from router.autoscale import signal_of
from router.breaker import Breaker
from router.chain_memo import ChainMemo
from router.config import RouterConfig
from router.errors import NoReplicaReadyError, NotFoundError, RouterError
from router.explain import Absence
from router.flow import Bound, bound_of
from router.gate import Gate
from router.hot import HotPrefixes
from router.index_mirror import IndexMirror
from router.load import LoadBook
from router.lora import Adapters
from router.metrics import RouterMetrics
from router.registry import Membership, Registry, Replica
from router.shared_load import SharedLoad
from router.tokenizer import ModelProfile
from router.worker_client import REFUSES_ROUTER, WorkerClient, WorkerError, WorkerTls

log = logging.getLogger(__name__)

_GET_MODEL_TIMEOUT_S = 10.0
_POLLS_PER_HEARTBEAT = 4
_REDIS_TIMEOUT_S = 2.0  # requests go on without it
_UNBOUND = Bound()
_LOOK_PAUSE_S = 0.05  # between looks that requests ask for


@dataclass(slots=True, eq=False)
class Member:
    """A replica generation and this router's connection to it."""

    replica: Replica
    client: WorkerClient
    breaker: Breaker = field(default_factory=Breaker)
    fault: str = ""  # what this router's own calls have met, until one succeeds
    heartbeat: int = 0  # of the last lease whose load was taken

    @property
    def has_gone(self) -> bool:
        """Whether it has taken its lease away and closed its server, maybe before anybody has seen it DRAINING.

        An emptied Redis has no lease of it either, but leaves the connection.
        """
        return self.replica.has_left and not self.client.is_connected

    @property
    def state(self) -> common_pb2.ReplicaState:
        """By its lease, unless it has gone."""
        return common_pb2.GONE if self.has_gone else self.replica.lease.state


class Fleet:
    """Follows Redis until stopped. Its members, index, loads and model are read by dispatch, in the same thread."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.members: dict[str, Member] = {}
        self.ready: dict[str, Member] = {}  # those that take user traffic; replaced, never changed
        self.ready_caches: dict[str, common_pb2.CacheState] = {}  # the same replicas' caches, as their leases tell
        self.bounds: dict[str, Bound] = {}  # of the same replicas: what each is given at most
        self._full: set[str] = set()  # of the same, but for those whose load has changed since
        self.adapters = Adapters({})  # of the ready ones
        self.absent: dict[str, Absence] = {}  # the other members, and why they take none
        self.hung: dict[str, Absence] = {}  # those whose leases say that their engines stand still
        self.on_hung: Callable[[], None] = lambda: None  # called at each look that finds any
        self.index = PrefixIndex()
        self.loads = LoadBook()
        self._gate = Gate(config.min_ready_replicas)
        self.scheme: HashScheme | None = None
        self.chains: ChainMemo | None = None  # of that scheme
        self.membership = Membership(config.fleet, config.lease_s)
        self._profile: ModelProfile | None = None
        files = config.worker_tls_files
        self._worker_tls = WorkerTls(files, config.worker_server_name) if files is not None else None
        if self._worker_tls is not None and config.worker_client_cert is not None:
            metrics.tls_expiry.labels("worker_client").set_function(self._worker_tls.certificates.expires_s)
        self._redis = connect_redis(
            config.redis_url,
            fleet=config.fleet,
            timeout_s=_REDIS_TIMEOUT_S,
            password_file=config.redis_password_file,
        )
        keys = FleetKeys(config.fleet)
        self._registry = Registry(self._redis, keys, self.membership, self._accept_contract, self._bad_key)
        self.mirror = IndexMirror(
            self._redis, keys, self.index, metrics, on_applied=self._on_applied, rng=random.Random(config.router_id)
        )
        self.hot = HotPrefixes(self._redis, keys, config, metrics)
        self.shared_load = SharedLoad(self._redis, keys, config, self.loads)
        self._num_tokenizer_hits = 0  # that the metric knows
        self._looking = asyncio.Lock()
        self._looked_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        # A cancellation that meets a Redis call may be lost inside the client: the loops look here as well.
        self._is_stopped = False

    async def start(self) -> None:
        """Look once, so that a running fleet is known from the first request on, then follow."""
        await self._look()
        await self.shared_load.start()
        follow = (
            *(self._follow_leases(), self.mirror.run(), self._follow_model(), self.hot.run(self._tokenizer)),
            *(self.shared_load.run_writer(), self.shared_load.run_reader()),
        )
        self._tasks = [asyncio.create_task(one) for one in follow]
        for task in self._tasks:
            task.add_done_callback(_report_end)

    async def stop(self) -> None:
        """Stop following and close every channel."""
        self._is_stopped = True
        self.mirror.stop()
        self.shared_load.stop()
        self.hot.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.shared_load.leave()
        for member in list(self.members.values()):
            await self._remove(member.replica)
        if self._profile is not None:
            self._profile.close()
        await self._redis.aclose()

    @property
    def profile(self) -> ModelProfile:
        """The served model. Raises ``NoReplicaReadyError`` until a replica has told it."""
        if self._profile is None:
            raise NoReplicaReadyError(
                f"no replica of fleet {self.config.fleet!r} has told its model yet: retry soon", retry_after_s=1
            )
        return self._profile

    def member(self, replica: str) -> Member:
        """The member of this name, ready or not. Raises ``NotFoundError``."""
        member = self.members.get(replica)
        if member is None:
            known = ", ".join(sorted(self.members)) or "none"
            raise NotFoundError(f"replica {replica!r} is not in the fleet; known: {known}", param="replica")
        return member

    def why_not_ready(self) -> str:
        """Empty when requests can be answered and placed by an index that has been loaded."""
        if not self.members:
            return f"no replica is registered in fleet {self.config.fleet!r}"
        if not self.ready:
            states = ", ".join(
                f"{m.replica.id} {m.replica.fault or common_pb2.ReplicaState.Name(m.state)}"
                for m in self.members.values()
            )
            return f"0 of {len(self.members)} replicas are ready: {states}"
        if closed := self._gate.why_closed():
            return closed
        if self._profile is None:
            faults = "; ".join(f"{m.replica.id} {m.fault}" for m in self.ready.values() if m.fault)
            return f"no replica has told its model yet: {faults}" if faults else "no replica has told its model yet"
        if not self.mirror.was_loaded:  # once is enough: else all routers would turn away requests at one lost event
            return "the index is being loaded"
        return ""

    @property
    def is_behind(self) -> bool:
        """Whether others may answer what this router cannot yet. Without a worker none is better than another."""
        return bool(self.ready and self.why_not_ready())

    @property
    def is_online(self) -> bool:
        """Whether Redis answered the last look at the leases."""
        return self._registry.online

    async def look_again(self) -> None:
        """Take in the leases as they stand now. Looks that are asked for together are one, of few a second."""
        asked_s = time.monotonic()
        async with self._looking:
            if self._looked_s < asked_s:
                await asyncio.sleep(self._looked_s + _LOOK_PAUSE_S - asked_s)
                await self._look()

    async def _follow_leases(self) -> None:
        period_s = self.config.heartbeat_s / _POLLS_PER_HEARTBEAT
        while not self._is_stopped:
            await asyncio.sleep(period_s)
            try:
                async with self._looking:
                    await self._look()
            except Exception:
                # Whatever one lease holds: the next look must come.
                log.exception("looking at the leases failed")

    async def _look(self) -> None:
        now = self._looked_s = time.monotonic()
        changes = await self._registry.poll(now, is_writable=not self.shared_load.is_refused)
        if self._worker_tls is not None:
            identity = self._worker_tls.certificates.current()
            for member in self.members.values():
                member.client.renew(identity)
        if changes is None:
            for name in self.members:
                self.loads.of(name).untold()
        else:
            for replica in changes.left:
                await self._remove(replica)
            for replica in changes.joined:
                self._add(replica)
            for member in self.members.values():
                lease = member.replica.lease
                member.client.move(lease.address)
                if member.replica.fault:
                    self.mirror.forget(lease.replica)
                    continue
                self.mirror.follow(lease.replica, lease.generation)
                self.loads.model.suggest(lease.load.prefill_tokens_per_s)
                if member.heartbeat != lease.heartbeat:
                    member.heartbeat = lease.heartbeat
                    load = lease.load
                    self.loads.of(lease.replica).told(load.waiting + load.running, load.waiting_tokens)
                self.mirror.audit(lease)
                self.hot.follow(lease, self.index)
        self._set_ready(
            {name: member for name, member in self.members.items() if member.replica.is_ready and not member.has_gone}
        )
        self._gate.observe(self.ready_caches.values(), self.shared_load.peers.has_work(), now)
        self.absent = {name: _absence(member) for name, member in self.members.items() if name not in self.ready}
        self.hung = {name: _hung(member) for name, member in self.members.items() if member.replica.lease.load.hung_s}
        if self.hung:
            self.on_hung()
        for replica_id in self.members:
            self.loads.confirm(replica_id, self.mirror.applied_seq(replica_id), now)
        self.loads.prune(self.members, now)
        self._report()

    def is_full(self, replica: str, num_choices: int = 1) -> bool:
        """Whether a ready replica has no room for a request of so many choices.

        By the requests of all routers and of whoever its lease tells of, and full too while a request of more choices,
        whose turn is before, waits for it to have room: else those of one choice would always take it first.
        """
        load = self.loads.of(replica)
        if load.held_requests:
            return True
        bound = self.bounds.get(replica, _UNBOUND)
        requests, tokens = load.in_flight + load.foreign_requests, load.waiting_tokens + load.foreign_tokens
        return bound.is_reached(requests, tokens, num_choices)

    def full(self) -> set[str]:
        """Those of the ready replicas that are, in a set of the caller's own.

        Only those whose load has changed are looked at: it is asked for with each request that leaves the queue.
        """
        for name in self.loads.changed:
            if name in self.ready and self.is_full(name):
                self._full.add(name)
            else:
                self._full.discard(name)
        self.loads.changed.clear()
        return self._full.copy()

    def _bound(self, member: Member) -> Bound:
        lease, config = member.replica.lease, self.config
        speed = lease.load.prefill_tokens_per_s
        return bound_of(lease.limits, speed, config.replica_requests, config.replica_tokens)

    def _accept_contract(self, contract: common_pb2.Contract) -> str:
        """Take the fleet's hash scheme, or say why this router cannot."""
        if self._profile is not None and self._profile.contract != contract:
            log.warning("the fleet's contract has changed, the model is asked for again")
            self._profile.close()
            self._profile = None
        if self.scheme is not None and self.scheme.fingerprint() == contract.hash_scheme:
            return ""
        self.scheme = self.chains = None
        fault = scheme_fault(self.config, contract)
        if not fault:
            self.scheme = HashScheme(contract.hash_algorithm, contract.block_size, self.config.hash_seed)
            self.chains = ChainMemo(self.scheme)
        return fault

    def _bad_key(self, kind: str) -> None:
        self.metrics.redis_bad_keys.labels(kind).inc()

    def _add(self, replica: Replica) -> None:
        lease = replica.lease
        log.info(
            "replica joined replica=%s generation=%s address=%s state=%s",
            *(lease.replica, lease.generation, lease.address, common_pb2.ReplicaState.Name(lease.state)),
        )
        self.members[lease.replica] = Member(replica, self._client(lease))

    def _client(self, lease: common_pb2.ReplicaLease) -> WorkerClient:
        return WorkerClient(lease.address, shown_token(self.config.worker_token), self._worker_tls)

    async def _remove(self, replica: Replica) -> None:
        member = self.members.pop(replica.id, None)
        if member is None:
            return
        log.info("replica left replica=%s generation=%s", replica.id, replica.generation)
        self.mirror.forget(replica.id)
        self.loads.forget(replica.id)
        self._set_ready({name: one for name, one in self.ready.items() if one is not member})
        await member.client.close()

    def _set_ready(self, ready: dict[str, Member]) -> None:
        self.ready = ready
        self.ready_caches = {name: member.replica.lease.cache for name, member in ready.items()}
        self.bounds = {name: self._bound(member) for name, member in ready.items()}
        self.adapters = Adapters({name: member.replica.lease for name, member in ready.items()})
        self._full = {name for name in ready if self.is_full(name)}

    async def _follow_model(self) -> None:
        while not self._is_stopped:
            if self._profile is None and self.scheme is not None:
                await self._learn_model()
            await asyncio.sleep(self.config.heartbeat_s / _POLLS_PER_HEARTBEAT)

    async def _learn_model(self) -> None:
        for member in self.ready.values():
            try:
                model = await member.client.get_model(_GET_MODEL_TIMEOUT_S)
                self._profile = await asyncio.to_thread(ModelProfile, model)
            except WorkerError as error:
                self.note(member, REFUSES_ROUTER if error.is_refusal else f"cannot tell its model ({error.reason})")
                continue
            except RouterError as error:
                self.note(member, f"has a model that cannot be served: {error}")
                continue
            for one in self.members.values():  # what was only slow to tell it is asked no more
                if one is member or one.fault != REFUSES_ROUTER:
                    one.fault = ""
            log.info("serving model=%s max_model_len=%d", model.served_model_name, model.max_model_len)
            return

    def note(self, member: Member, fault: str) -> None:
        """Keep what a call to a replica has met, as its fault; logged when it is news."""
        if member.fault != fault:
            member.fault = fault
            log.warning("replica=%s fault=%r", member.replica.id, fault)

    def _tokenizer(self) -> str:
        contract = self.membership.contract
        return contract.tokenizer if contract is not None else ""

    def _on_applied(self, replica: str, seq: int) -> None:
        self.loads.confirm(replica, seq, time.monotonic())

    def _report(self) -> None:
        metrics = self.metrics
        metrics.redis_up.set(self._registry.online)
        is_followed = self._registry.online and not self.shared_load.is_refused
        metrics.set_index_mode(self.mirror.mode if is_followed else "local")
        if self._profile is not None:
            hits = self._profile.encoder.num_hits
            metrics.tokenizer_cache_hits.inc(max(0, hits - self._num_tokenizer_hits))
            self._num_tokenizer_hits = hits
        metrics.index_parentless_blocks.set(self.index.num_parentless())
        metrics.index_partial_replicas.set(sum(not self.index.is_complete(name) for name in self.members))
        metrics.replicas_ready.set(len(self.ready))
        metrics.replicas_hung.set(len(self.hung))
        signal = signal_of([member.replica.lease for member in self.ready.values()])
        metrics.waiting_seconds.set(signal.waiting_s)
        metrics.work.set(signal.work)
        refused = 0
        for name, member in self.members.items():
            metrics.inflight_tokens.labels(name).set(self.loads.of(name).own.waiting_tokens)
            if member.replica.fault:
                refused += 1
            else:
                metrics.index_blocks.labels(name).set(self.index.num_blocks(name))
        metrics.replicas_refused.set(refused)


def scheme_fault(config: RouterConfig, contract: common_pb2.Contract) -> str:
    """Why a router so configured cannot name blocks as this fleet does; empty when it can."""
    if config.hash_algorithm is not None and config.hash_algorithm != contract.hash_algorithm:
        return (
            f"--prefix-caching-hash-algo is {config.hash_algorithm}, "
            f"fleet {config.fleet!r} has {contract.hash_algorithm}: leave the flag out or make them equal"
        )
    if config.block_size is not None and config.block_size != contract.block_size:
        return (
            f"--block-size is {config.block_size}, fleet {config.fleet!r} has {contract.block_size}: "
            "leave the flag out or make them equal"
        )
    try:
        scheme = HashScheme(contract.hash_algorithm, contract.block_size, config.hash_seed)
    except (ValueError, ModuleNotFoundError) as error:
        return str(error)
    if scheme.fingerprint() != contract.hash_scheme:
        return (
            f"the hash seed of this router is not that of fleet {config.fleet!r}: "
            "give all of them the same WARMFRONT_HASH_SEED or --prefix-caching-hash-seed-file"
        )
    return ""


def _absence(member: Member) -> Absence:
    state, replica = common_pb2.ReplicaState.Name(member.state), member.replica
    if replica.fault:
        return Absence(state, "contract", replica.fault)
    return Absence(state, state.lower(), replica.lease.fault)


def _hung(member: Member) -> Absence:
    lease = member.replica.lease
    detail = f"one step of its engine has run for {lease.load.hung_s:.0f} s"
    return Absence(common_pb2.ReplicaState.Name(lease.state), "hung", detail)


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("a background task ended: the router's view stands still", exc_info=task.exception())
