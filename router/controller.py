"""Keeps the wanted routers and workers running: starts and watches them, replaces those that hang, rolls out new ones.

The loop looks at what is wanted (a file that is read again when it changes), at what runs (a ``Launcher``: Ray actors,
or child processes of `up`) and at the workers' leases, asks ``reconcile.plan`` what to do, and does it. Whoever runs
parts restarts one whose process dies, but nobody else notices one that hangs: so each is asked every second and with a
deadline, and after three strikes in a row its process is killed. The controller is not on the request path; one that
is started again adopts what runs.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from warmfront_pb.v1 import common_pb2

from router.autoscale import Autoscaler, Signal, signal_of
from router.launcher import Desired, Health, Launcher, Seen
from router.reconcile import (
    DRAINING,
    GONE,
    READY,
    STARTING,
    Action,
    Drain,
    Group,
    Memory,
    Part,
    Rollout,
    hold_out,
    phase_of,
    plan,
)
from router.registry import LeaseReader

log = logging.getLogger(__name__)

STATUS_FILE, MEMORY_FILE = "status.json", "memory.json"
_LONGEST_BACKOFF_S = 30.0
_DRAIN_MARGIN_S = 15.0
_UNKNOWN_START_S, _UNKNOWN_DRAIN_S = 600.0, 30.0  # of a part whose settings nobody knows any more
_PREFIXES = {"router": "router-", "worker": "w"}


@dataclass(slots=True)
class _Record:
    seen: Seen
    health: Health
    state: str = STARTING
    fault: str = ""
    exit_code: int = 0
    is_new: bool = True  # it has never been READY
    drain_until_s: float | None = None  # we have asked it to drain, and wait until then
    is_replaced: bool = False  # somebody else has, and a part was asked for in its place
    ended: int = 0  # times that its process ended, or was killed because it hung, and another was started
    why_ended: str = ""

    @property
    def told_state(self) -> str:
        return DRAINING if self.drain_until_s is not None else self.state

    def note_end(self, why: str) -> None:
        self.ended, self.why_ended = self.ended + 1, why

    @property
    def is_drained_by_others(self) -> bool:
        """Where it drains or was drained: by nobody who wants another in its place."""
        return self.drain_until_s is None and not self.is_replaced


class Controller:
    """The loop, in a thread of its own. ``state_dir`` gets ``status.json``, and ``memory.json`` for the next one."""

    def __init__(
        self,
        read_desired: Callable[[], Desired],
        make_launcher: Callable[[Desired], Launcher],
        state_dir: Path,
        period_s: float = 1.0,
    ) -> None:
        self._read_desired = read_desired
        self._make_launcher = make_launcher
        self._state_dir = state_dir
        self._period_s = period_s
        self._desired: Desired | None = None
        self._desired_error = ""
        self._launcher: Launcher | None = None
        self._leases: LeaseReader | None = None
        self._autoscaler: Autoscaler | None = None
        self._signal = Signal()
        self._records: dict[str, _Record] = {}
        self._groups: dict[str, Group] = {}  # by revision: those wanted, and the last good ones
        self._memories: dict[str, Memory] = {}  # by role
        self._retries: dict[str, tuple[float, float]] = {}  # of parts that cannot be made: when next, and the wait
        self._status = ""
        self._remembered: dict[str, Any] = {}
        self._to_drain: set[str] = set()  # by an earlier controller's word
        self._recall()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="controller", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the loop goes on."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop watching; the parts go on."""
        self._is_stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        told = ""
        while not self._is_stopped.is_set():
            try:
                self.look()
                told = ""
            except Exception as error:  # Ray's head is away, say: the next look must come
                if repr(error) != told:
                    log.exception("looking at the parts failed")
                told = repr(error)
            self._is_stopped.wait(self._period_s)

    def look(self) -> None:
        """One turn of the loop."""
        self._take_desired()
        if self._desired is None:
            self._write_status([])
            return
        if self._launcher is None:
            self._launcher = self._make_launcher(self._desired)
        leases = self._read_leases(self._desired)
        self._observe(self._launcher, leases)
        for group in self._wanted_groups(self._desired):
            self._reconcile(self._launcher, group, leases)
        self._remember()
        self._write_status(self._wanted_groups(self._desired))

    # What is wanted

    def _take_desired(self) -> None:
        try:
            desired = self._read_desired()
        except (ValueError, OSError) as error:
            if str(error) != self._desired_error:
                log.error("desired state refused, the last one holds: %s", error)
            self._desired_error = str(error)
            return
        if self._desired is not None and desired.fleet != self._desired.fleet:
            self._desired_error = (
                f"fleet was {self._desired.fleet} and cannot become {desired.fleet}: start another controller for it"
            )
            return
        self._desired_error = ""
        if desired != self._desired:
            log.info("desired %s", " ".join(f"{g.role}s={g.count} revision={g.revision}" for g in desired.groups))
            self._leases = LeaseReader(desired.redis_url, desired.redis_password_file, desired.fleet)
            self._desired = desired

    def _wanted_groups(self, desired: Desired) -> list[Group]:
        """The groups, with the number of workers that the load asks for."""
        groups = []
        for group in desired.groups:
            if group.each_node and self._launcher is not None:
                group = replace(group, count=self._launcher.num_nodes(group))
            if group.role == "worker" and desired.autoscale is not None:
                if self._autoscaler is None:  # an earlier controller may have set another count: go on from there
                    count = self._remembered.get("autoscaled") or self._num_workers() or group.count
                    self._autoscaler = Autoscaler(count)
                group = replace(group, count=self._autoscaler.count)
            groups.append(group)
        if desired.autoscale is None:
            self._autoscaler = None
        return groups

    def _read_leases(self, desired: Desired) -> Mapping[str, common_pb2.ReplicaLease]:
        """By replica; none while Redis is away, when the signal stays as it was."""
        assert self._leases is not None
        leases = self._leases.read()
        if leases is None:
            return {}
        bounds = desired.autoscale
        self._signal = signal_of(leases, bounds.target_wait_s) if bounds is not None else signal_of(leases)
        if bounds is not None and self._autoscaler is not None:
            before = self._autoscaler.count
            if self._autoscaler.observe(self._signal, bounds, time.monotonic()) != before:
                log.info("autoscale workers=%d before=%d signal=%s", self._autoscaler.count, before, self._signal)
        return {lease.replica: lease for lease in leases}

    # What runs

    def _observe(self, launcher: Launcher, leases: Mapping[str, common_pb2.ReplicaLease]) -> None:
        now = time.monotonic()
        looked = {seen.name: seen for seen in launcher.look(leases)}
        for name in self._records.keys() - looked.keys():
            del self._records[name]
        for name, seen in looked.items():
            record = self._records.get(name)
            if record is None:
                record = self._records[name] = _Record(seen, Health(now))
                if name in self._to_drain:
                    self._note_drain(record)  # an earlier controller asked it to
            record.seen = seen
            if seen.state == GONE and not seen.fault and not seen.is_restarting:
                self._let_go(launcher, record)
            elif seen.is_dead:
                record.fault, record.exit_code, record.state = seen.fault or seen.error, seen.exit_code, GONE
                self._start_again(launcher, record, now)
            else:
                self._judge(launcher, record, now)
        self._to_drain.clear()

    def _judge(self, launcher: Launcher, record: _Record, now: float) -> None:
        seen, health = record.seen, record.health
        if seen.pid not in (0, health.boot) or (health.has_served and seen.is_restarting):
            if record.is_new and health.boot and not record.fault:
                record.fault = seen.fault or "it ended before it was READY"
            if health.boot:
                record.note_end(seen.fault or "its process ended")
            health.begin_boot(now, seen.pid)
        if seen.fault and record.is_new:
            record.fault, record.exit_code = seen.fault, seen.exit_code
        if seen.answers:
            record.state = seen.state
        elif seen.is_restarting:
            record.state = STARTING
        if record.state == READY:
            record.is_new, record.fault = False, ""
            self._retries.pop(seen.name, None)
        if record.drain_until_s is not None:
            if now > record.drain_until_s:
                log.error("part did not drain in time and is ended part=%s", seen.name)
                launcher.remove(seen.name)
                del self._records[seen.name]
        elif record.state == DRAINING:
            pass  # somebody else's drain has a deadline of its own, and ends when its worker does
        elif seen.is_leaving:
            log.info("node is shut down, its part drains part=%s", seen.name)
            self._drain(launcher, record)
        elif health.observe(seen.error, now, self._start_s(seen.revision)):
            log.error("part is replaced part=%s error=%r", seen.name, seen.error)
            record.state = STARTING
            record.note_end(seen.error)
            launcher.replace(seen.name)

    def _let_go(self, launcher: Launcher, record: _Record) -> None:
        """A part that was drained stays away. Where somebody else asked for it, none takes its place."""
        seen = record.seen
        log.info("part was drained part=%s", seen.name)
        if record.is_drained_by_others:
            self._memories[seen.role] = hold_out(self._memories.get(seen.role, Memory()), seen.name)
        launcher.remove(seen.name)
        del self._records[seen.name]

    def _start_s(self, revision: str) -> float:
        group = self._groups.get(revision)
        return group.start_s if group is not None else _UNKNOWN_START_S

    def _start_again(self, launcher: Launcher, record: _Record, now: float) -> None:
        """One that could not even be made: later each time."""
        seen = record.seen
        group = self._groups.get(seen.revision)
        at_s, wait_s = self._retries.get(seen.name, (now, 0.5))
        if now < at_s:
            return
        log.error("part could not be started part=%s error=%r", seen.name, record.fault)
        self._retries[seen.name] = (now + wait_s, min(_LONGEST_BACKOFF_S, 2 * wait_s))
        launcher.remove(seen.name)
        if group is None or record.drain_until_s is not None:
            del self._records[seen.name]
        else:
            launcher.start(group, seen.name, seen.revision)

    # What to do

    def _drain(self, launcher: Launcher, record: _Record) -> None:
        launcher.drain(record.seen.name, self._note_drain(record))

    def _note_drain(self, record: _Record) -> float:
        """Waits for it to drain; how long its answers may take."""
        group = self._groups.get(record.seen.revision)
        deadline_s = group.drain_s if group is not None else _UNKNOWN_DRAIN_S
        record.drain_until_s = time.monotonic() + deadline_s + _DRAIN_MARGIN_S
        return deadline_s

    def _num_workers(self) -> int:
        """Those that run and do not leave."""
        return sum(one.seen.role == "worker" and one.told_state != DRAINING for one in self._records.values())

    def _parts_of(self, launcher: Launcher, group: Group) -> list[Part]:
        """The parts that a group's plan is made with: with one for each node, those of other nodes are not among them.

        They serve until their nodes are shut down. What waits for a node of theirs when the last has gone is ended.
        """
        parts = self._parts(group.role)
        if not group.each_node:
            return parts
        known = {revision: one for revision, one in self._groups.items() if one.placement != group.placement}
        for part in [part for part in parts if part.revision in known]:
            parts.remove(part)
            if not self._records[part.name].seen.answers and not launcher.num_nodes(known[part.revision]):
                log.info("no node is left for part=%s", part.name)
                launcher.remove(part.name)
                del self._records[part.name]
        return parts

    def _parts(self, role: str) -> list[Part]:
        return [
            Part(
                name=record.seen.name,
                revision=record.seen.revision,
                state=record.told_state,
                fault=record.fault,
                is_held=record.state == DRAINING and record.is_drained_by_others,
            )
            for record in self._records.values()
            if record.seen.role == role
        ]

    def _reconcile(self, launcher: Launcher, group: Group, leases: Mapping[str, common_pb2.ReplicaLease]) -> None:
        assert self._desired is not None
        memory = self._memories.get(group.role, Memory())
        if memory.good and memory.good not in self._groups:  # nobody knows its settings any more
            memory = replace(memory, good="")
        if memory.asks_again(group):
            for record in self._records.values():
                record.is_replaced |= record.seen.role == group.role and record.state == DRAINING
        self._groups[group.revision] = group
        suffix = self._desired.suffix if group.role == "worker" else ""
        names = {*leases, *self._records} if group.role == "worker" else self._records.keys()
        taken = {name.removesuffix(suffix) for name in names}
        parts = [replace(part, name=part.name.removesuffix(suffix)) for part in self._parts_of(launcher, group)]
        before = memory
        actions, memory = plan(
            group,
            parts,
            memory,
            now=time.time(),
            wait_s=self._signal.wait_s,
            taken=taken,
            prefix=_PREFIXES[group.role],
        )
        if memory.failed != before.failed and memory.failed:
            log.error("rollout failed role=%s revision=%s why=%r", group.role, memory.failed, memory.why)
        self._memories[group.role] = memory
        for action in actions:
            self._act(launcher, group.role, action.name + suffix, action)
        self._forget_groups(self._desired)

    def _act(self, launcher: Launcher, role: str, name: str, action: Action) -> None:
        if isinstance(action, Drain):
            record = self._records[name]
            log.info("drain part=%s revision=%s", name, record.seen.revision)
            self._drain(launcher, record)
            return
        log.info("start part=%s revision=%s", name, action.revision)
        launcher.start(self._groups[action.revision], name, action.revision)
        seen = Seen(role=role, name=name, revision=action.revision)
        self._records[name] = _Record(seen, Health(time.monotonic()))

    def _forget_groups(self, desired: Desired) -> None:
        """The settings of which no part runs, and that none will go back to."""
        kept = {memory.good for memory in self._memories.values()} | {group.revision for group in desired.groups}
        kept |= {record.seen.revision for record in self._records.values()}
        self._groups = {revision: one for revision, one in self._groups.items() if revision in kept}

    # What is told and kept

    def _recall(self) -> None:
        try:
            kept = json.loads((self._state_dir / MEMORY_FILE).read_text(encoding="utf-8"))
            for role, values in kept["memories"].items():
                self._memories[role] = Memory(**{**values, "held_out": tuple(values["held_out"])})
            for values in kept["groups"]:
                group = Group(**{**values, "rollout": Rollout(**values["rollout"])})
                self._groups[group.revision] = group
            self._to_drain = set(kept.get("draining", ()))
            self._remembered = kept
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("cannot read what an earlier controller remembered: %r", error)

    def _remember(self) -> None:
        good = {memory.good for memory in self._memories.values()}
        content: dict[str, Any] = {
            "memories": {
                role: {**asdict(memory), "held_out": list(memory.held_out)} for role, memory in self._memories.items()
            },
            "groups": [asdict(group) for revision, group in self._groups.items() if revision in good],
            "draining": [name for name, one in self._records.items() if one.drain_until_s is not None],
            "autoscaled": self._autoscaler.count if self._autoscaler is not None else None,
        }
        if content != self._remembered:
            self._write(MEMORY_FILE, json.dumps(content))
            self._remembered = content

    def _write_status(self, groups: list[Group]) -> None:
        report = {
            "controller": os.getpid(),
            "fleet": self._desired.fleet if self._desired is not None else "",
            "desired_error": self._desired_error,
            "signal": {**asdict(self._signal), "wait_s": self._signal.wait_s},
            "groups": {group.role: self._group_status(group) for group in groups},
            "parts": [self._part_status(record) for record in self._records.values()],
        }
        text = json.dumps(report, indent=1)
        if text != self._status:
            self._write(STATUS_FILE, text)
            self._status = text

    def _group_status(self, group: Group) -> dict[str, Any]:
        memory, parts = self._memories.get(group.role, Memory()), self._parts(group.role)
        return {
            "count": group.count,
            "attempt": group.attempt,
            "held_out": list(memory.held_out),
            "revision": group.revision,
            "good": memory.good,
            "phase": phase_of(group, parts, memory),
            "why": memory.why,
            "timed_out": memory.timed_out,
            "ready": sum(part.is_ready for part in parts),
            "new": sum(part.is_ready and part.revision == group.revision for part in parts),
        }

    def _part_status(self, record: _Record) -> dict[str, Any]:
        seen = record.seen
        return {
            "role": seen.role,
            "name": seen.name,
            "revision": seen.revision,
            "pid": seen.pid,
            "node": seen.node,
            "address": seen.address,
            "generation": seen.generation,
            "state": record.told_state,
            "fault": record.fault,
            "exit_code": record.exit_code,
            "error": seen.error,
            "not_ready": seen.not_ready,
            "strikes": record.health.strikes,
            "restarts": record.health.restarts,
            "ended": record.ended,
            "why_ended": record.why_ended,
        }

    def _write(self, name: str, text: str) -> None:
        """In one step, readable by its owner alone: settings may hold a password."""
        path = self._state_dir / name
        temporary = path.with_name(f".{name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
