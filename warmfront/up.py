"""``warmfront up``: a whole cluster on this machine, in the foreground, of which nothing is left when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import click
from click.core import ParameterSource
from rich.console import Console
from rich.text import Text

from common.address import host_port
from warmfront.client import Address, Client, shown_by_environment
from warmfront.console import Progress, counted, say
from warmfront.desired import DESIRED_FILE, SHARED, number_of, read_status, write_desired
from warmfront.errors import DeadlinePassed, Failure, Lost, WrongUse
from warmfront.flags import UpConfig, flags_of
from warmfront.options import SectionedCommand, fill, warn_of_typed_password, with_options
from warmfront.preflight import check_settings, gpus_of, on_as_many_gpus
from warmfront.processes import tail
from warmfront.run_dir import RUN_DIR_ENV, Process, RunDir, write_private
from warmfront.shown import examples, typed_command
from warmfront.starting import step_of, summary
from warmfront.store import EmbeddedValkey, lasting_port
from warmfront.values import format_duration, mask_url

_RESTART = "to start Valkey again"
_UNTIL_RAY_ENDS_S = 40.0  # Ray ends every process of a cluster whose GCS has been away for a minute


class Parts(Protocol):
    """How routers and workers run: as child processes, or as actors of a local Ray cluster."""

    async def begin(self, fleet: str, stop: asyncio.Event) -> None:
        """Starts a controller, which starts every part that the file in the run directory wants, unless ``stop``."""
        ...

    async def stop(self, role: str, deadline_s: float, hurry: asyncio.Event) -> None:
        """Ends the controller, and lets the parts of one role drain until the deadline or until ``hurry`` is set."""
        ...

    async def close(self) -> None:
        """Ends whatever the parts ran on."""
        ...

    def fault(self) -> str:
        """Why the parts cannot be kept, nor asked to end; empty while they can."""
        ...


@click.command(cls=SectionedCommand)
@with_options("up")
def up(**params: Any) -> None:
    """Run a cluster on this machine, in the foreground: routers, workers, and a Valkey unless --redis names a server.

    Ctrl-C or SIGTERM lets running requests end and leaves nothing behind; a second one hurries.
    """
    settings = fill(UpConfig, params)
    if click.get_current_context().get_parameter_source("replicas") is ParameterSource.DEFAULT:
        settings = on_as_many_gpus(settings, params)
    check_settings(settings, params)
    warn_of_typed_password(click.get_current_context())
    with _run_dir() as run_dir:
        asyncio.run(_Cluster(settings, params, run_dir).run())


@contextmanager
def _run_dir() -> Iterator[RunDir]:
    """A run directory that is removed whatever signal comes, also before and after the cluster listens for them."""
    before = {number: signal.getsignal(number) for number in _end_signals()}

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, end)
    run_dir = None
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, before)
        try:
            run_dir = RunDir.create()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        yield run_dir
    except OSError as error:  # a full disk, say
        raise Failure(str(error) or type(error).__name__) from error
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        if run_dir is not None:
            run_dir.remove()
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_signals() -> list[signal.Signals]:
    """The signals that end a cluster."""
    has_terminal = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # else it was started by nohup
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if has_terminal else [])]


class _Cluster:
    """One run, from the first process to the last. Every step leaves something that ``RunDir.remove`` can undo."""

    def __init__(self, settings: UpConfig, params: dict[str, Any], run_dir: RunDir) -> None:
        self._settings, self._params, self._run_dir = settings, params, run_dir
        self._log_dir = settings.log_dir or run_dir.path / "logs"
        # Every worker may use every core, as idle threads sleep; Ray would give an actor one thread.
        threads = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
        self._env = {RUN_DIR_ENV: str(run_dir.path), "OMP_NUM_THREADS": threads}
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._valkey: EmbeddedValkey | None = None
        self._http_port = params["http_port"] or lasting_port()
        self._grpc_port = params["grpc_port"] or lasting_port()
        host = params["listen"] if params["listen"] not in ("0.0.0.0", "::") else "127.0.0.1"  # noqa: S104
        self._tls_cert: str | None = self._flags("router").get("tls_cert")
        self._http = f"{'https' if self._tls_cert else 'http'}://{host_port(host, self._http_port)}"
        self._grpc = host_port(host, self._grpc_port)
        self._out = Console(file=sys.stdout, highlight=False, soft_wrap=True)  # Ray is given another standard output
        cert, key = shown_by_environment()
        address = Address(url=self._http, cert=cert, key=key, pinned=self._tls_cert)
        self._client = Client(address, timeout_s=10)
        # In a Redis of its own a cluster's parts need no longer names; in a shared one they must differ.
        self._suffix = "" if settings.redis_url is None else f"-{run_dir.path.name[-5:].replace('_', '0')}"
        self._replicas: list[dict[str, Any]] = []
        self._published: tuple[list[dict[str, Any]], dict[str, list[int]]] = [], {"router": []}
        self._has_served = False
        self._failing: set[str] = set()  # what is tried again and again
        self._parts = self._make_parts()

    async def run(self) -> None:
        """Starts, shows, watches, and ends with the first signal."""
        with self._signals(), Progress() as progress:
            try:
                await self._start(progress)
                await self._until_ready(progress)
                if not self._stop.is_set():
                    self._has_served = True
                    progress.close()
                    self._publish()
                    self._show()
                    await self._watch()
            finally:
                await self._end(progress)

    async def _start(self, progress: Progress) -> None:
        self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        url = self._settings.redis_url
        if url is None:
            progress.update("starting Valkey")
            self._valkey = EmbeddedValkey(self._run_dir.path, self._env)
            url = self._valkey.url
        self._redis_url = url
        token_file = self._params["worker_token_file"]
        if token_file is None:
            token_file = str(self._run_dir.path / "worker-token")
            write_private(Path(token_file), secrets.token_urlsafe(32))
        progress.update("starting Ray" if not self._settings.without_ray else "starting routers and workers")
        write_desired(self._run_dir.path / DESIRED_FILE, self._desired(token_file))
        await self._parts.begin(self._params["fleet"], self._stop)

    def _desired(self, token_file: str) -> dict[str, Any]:
        """The file that the controller works by, and that ``scale`` and ``rollout`` change."""
        first, password_file = self._params["metrics_port"], self._params["redis_password_file"]
        # Workers speak to routers of this machine alone. Ray shows each actor one GPU.
        own = {"listen": "127.0.0.1", "insecure_listen": False}
        if first:
            own["metrics_port"] = first + self._settings.routers
        takes_gpu = self._params["engine"] == "model" and self._params["device"] != "cpu" and gpus_of("auto")
        ports = {"http_port": self._http_port, "grpc_port": self._grpc_port}
        shares = self._settings.routers > 1
        return {
            "fleet": self._params["fleet"],
            "redis": self._redis_url,
            **({"redis_password_file": str(password_file.absolute())} if password_file is not None else {}),
            "worker_token_file": token_file,
            "suffix": self._suffix,
            "routers": {
                "count": self._settings.routers,
                "settings": {**self._flags("router"), **ports, "reuse_port": shares},
                "rollout": {"surge": 1 if shares else 0},
            },
            "workers": {
                "replicas": self._settings.replicas,
                "num_gpus": 1 if takes_gpu else 0,
                "settings": {**self._flags("worker"), **own},
            },
        }

    def _make_parts(self) -> Parts:
        if self._settings.without_ray:
            from warmfront.processes import ChildProcesses

            return ChildProcesses(self._run_dir, self._log_dir, self._env, gpus_of(self._params["device"]))
        from warmfront.cluster import RayActors

        return RayActors(self._run_dir, self._log_dir, self._env)

    def _names(self) -> list[str]:
        """The replicas that it starts with."""
        return [f"w{number}{self._suffix}" for number in range(self._settings.replicas)]

    def _flags(self, command: str) -> dict[str, Any]:
        """What was typed for a router or a worker, as it stands in a file; without what all of them share."""
        flags = {}
        for flag in flags_of(command):
            value = self._params.get(flag.param)
            # TLS is for what others reach; workers are on loopback.
            is_ours = flag.param not in SHARED and not (command == "worker" and flag.name.startswith("tls-"))
            if value is not None and is_ours:
                plain = format_duration(value) if isinstance(value, float) and flag.type.name == "duration" else value
                if isinstance(plain, Path):  # one that is not there stays as it was typed; `bytes` is a word
                    plain = str(plain.absolute() if plain.exists() else plain)
                elif flag.multiple:
                    plain = [str(one.absolute() if isinstance(one, Path) else one) for one in plain]
                flags[flag.param] = plain
        return flags

    async def _until_ready(self, progress: Progress) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.start_deadline_s
        names = set(self._names())
        while not self._stop.is_set():
            self._check_parts()
            self._check_started()
            if await self._look():
                mine = {replica["id"]: replica["state"] for replica in self._replicas if replica["id"] in names}
                states = {name: mine.get(name, "STARTING") for name in self._names()}
                doing = {name: step_of(state, tail(self._log_dir / f"{name}.log")) for name, state in states.items()}
                progress.update(summary(states), summary(doing))
                pids = self._state()[1]  # the controller tells them once it has looked
                is_known = len(pids["router"]) >= self._settings.routers and len(pids["worker"]) >= len(names)
                ready = is_known and all(mine.get(name) == "READY" for name in names)
                if ready and await asyncio.to_thread(self._are_routers_ready):
                    return
            if loop.time() > deadline:
                raise DeadlinePassed(
                    f"not ready after {format_duration(self._settings.start_deadline_s)} (--start-deadline); "
                    f"{counted(len(self._replicas), 'replica')} registered, logs were in {self._log_dir}"
                )
            await self._pause(0.2)

    def _are_routers_ready(self) -> bool:
        """Whether each is. Several share their ports: which of them answers there nobody knows."""
        if self._settings.routers == 1:  # the controller knows it later
            return self._client.is_ready()
        parts = [part for part in read_status(self._run_dir.path).get("parts", ()) if part["role"] == "router"]
        return all(part["state"] == "READY" and not (part["error"] or part["not_ready"]) for part in parts)

    def _check_parts(self) -> None:
        """Raises when what they run on has died: they end, in order, while they still can."""
        if fault := self._parts.fault():
            kept = (
                f"logs are in {self._log_dir}" if self._settings.log_dir else "--log-dir keeps the logs of the next one"
            )
            raise Lost(f"{fault}: the cluster cannot go on without, and was ended; {kept}")

    def _check_started(self) -> None:
        """Raises when a part has ended: it is started again, but what ends at its first start ends for a reason."""
        for part in read_status(self._run_dir.path).get("parts", ()):
            if part["fault"]:
                error = WrongUse if part["exit_code"] == 2 else Failure
                code = f" with code {part['exit_code']}" if part["exit_code"] > 0 else ""
                raise error(f"{part['name']} ended{code} while starting: {part['fault']}")

    async def _watch(self) -> None:
        """Says what changes, and keeps the ready file true, until a signal comes."""
        seen = {replica["id"]: replica["state"] for replica in self._replicas}
        ended: dict[str, int] = {}
        while not self._stop.is_set():
            await self._pause(1.0)
            self._check_parts()
            for part in read_status(self._run_dir.path).get("parts", ()):
                if part["ended"] > ended.get(part["name"], 0):
                    say(f"{part['name']} has ended and is started again: {part['why_ended']}")
                ended[part["name"]] = part["ended"]
            if self._valkey is not None and not self._valkey.is_running() and not self._stop.is_set():
                if _RESTART not in self._failing:
                    say("Valkey has ended; starting it again")
                self._attempt(_RESTART, self._valkey.restart)
            if not await self._look():
                continue
            now = {replica["id"]: replica["state"] for replica in self._replicas}
            for name in sorted(now.keys() | seen.keys()):
                if now.get(name, "GONE") != seen.get(name):
                    say(f"{name} {now.get(name, 'GONE')}")
            seen = {**dict.fromkeys(seen, "GONE"), **now}
            state = self._state()
            if state != self._published:
                self._attempt("to write its state", self._publish)

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        """Does what serving can do without. Where that fails it is told of, once, and tried again at the next look."""
        try:
            action()
        except (OSError, Failure) as error:
            if what not in self._failing:
                say(f"failed {what}, and tries again: {error}")
            self._failing.add(what)
        else:
            self._failing.discard(what)

    async def _end(self, progress: Progress) -> None:
        if not self._has_served:
            self._hurry.set()  # nobody waits for an answer
        elif self._stop.is_set():
            running = sum(replica.get("running", 0) for replica in self._replicas)
            still = f", {counted(running, 'request')} running" if running else ""
            progress.update(f"draining{still} (Ctrl-C again to hurry)")
        if fault := self._parts.fault():
            progress.close()
            say(f"{fault}; running requests may end")
            await self._drain_by_router(min(self._stop_s(), _UNTIL_RAY_ENDS_S))
        else:
            await self._parts.stop("router", self._stop_s() + self._params["drain_notice"], self._hurry)
            await self._parts.stop("worker", self._stop_s(), self._hurry)
        await self._parts.close()
        if self._valkey is not None:
            self._valkey.stop()
        progress.close()
        if self._stop.is_set():
            say("stopped, nothing is left behind")

    async def _drain_by_router(self, deadline_s: float) -> None:
        """Lets running requests end where the parts cannot be asked to: the workers drain, new requests are refused."""
        end = asyncio.get_running_loop().time() + deadline_s
        await self._look()
        for replica in self._replicas:
            body = {"replica": replica["id"], "deadline_ms": int(deadline_s * 1000)}
            with suppress(Failure):
                await asyncio.to_thread(self._client.post, "/v1/drain", body)
        while await self._look() and any(replica["state"] != "GONE" for replica in self._replicas):
            if self._hurry.is_set() or asyncio.get_running_loop().time() > end:
                return
            await asyncio.sleep(0.2)

    def _stop_s(self) -> float:
        """How long the parts of one role may take to end."""
        return float(self._params["drain_deadline"]) + 5

    async def _look(self) -> bool:
        """Asks a router for the replicas; False when none answers."""
        try:
            replicas = (await asyncio.to_thread(self._client.get, "/v1/replicas"))["replicas"]
        except Failure:
            return False
        self._replicas = sorted(replicas, key=lambda replica: number_of(replica["id"]))  # as the process ids
        return True

    async def _pause(self, seconds: float) -> None:
        """Sleeps, but not past a signal."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if not self._stop.is_set() and not self._has_served:
                say("stopping; what has begun to start is ended")
            (self._hurry if self._stop.is_set() else self._stop).set()

        # By no handler of the loop's: to remove one leaves a moment in which the signal kills.
        numbers = _end_signals()
        for number in numbers:
            signal.signal(number, lambda number, frame: loop.call_soon_threadsafe(on_signal))
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)  # all has ended but for the run directory

    def _state(self) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
        """Replicas and process ids as the ready file tells them."""
        replicas = [{key: replica[key] for key in ("id", "address", "state")} for replica in self._replicas]
        parts = sorted(read_status(self._run_dir.path).get("parts", ()), key=lambda part: number_of(part["name"]))
        pids = {role: [p["pid"] for p in parts if p["role"] == role and p["pid"]] for role in ("router", "worker")}
        return replicas, {**pids, "redis": [self._valkey.pid] if self._valkey is not None else []}

    def _publish(self) -> None:
        """Writes ready file and run directory as they are now."""
        state = replicas, pids = self._state()
        self._run_dir.processes = self._run_dir.processes[:1]
        for role, ids in pids.items():
            for pid in ids:
                try:
                    self._run_dir.processes.append(Process.of(role, pid))
                except ProcessLookupError:
                    continue  # died a moment ago
        self._run_dir.cluster = {
            "http": self._http,
            "grpc": self._grpc,
            "fleet": self._params["fleet"],
            "tls_cert": self._tls_cert,
            "stop_within_s": 2 * self._stop_s() + self._params["drain_notice"],
            "worker": self._flags("worker"),  # what `compare` starts its own worker with
        }
        ready_file = self._settings.ready_file
        self._run_dir.ready_file = str(ready_file.absolute()) if ready_file else None
        self._run_dir.save()
        if ready_file is not None:
            content = {
                "http": self._http,
                "grpc": self._grpc,
                "redis": mask_url(self._redis_url),
                "replicas": replicas,
                "pids": pids,
                "run_dir": str(self._run_dir.path),
            }
            write_private(ready_file, json.dumps(content, indent=1) + "\n")
        self._published = state

    def _show(self) -> None:
        model = self._replicas[0].get("model", "")
        lines = [
            "warmfront is ready",
            "",
            f"  HTTP      {self._http}/v1      gRPC  {self._grpc}",
            f"  model     {model}",
            *(f"  replica   {replica['id']}  {replica['state']}  {replica['address']}" for replica in self._replicas),
            f"  logs      {self._log_dir}",
            "",
            *examples(self._http, model, asks_for_certificates=self._params["tls_client_ca"] is not None),
            "",
            f"  In another terminal {typed_command()} chat, status and compare show what the cache does.",
            "  Ctrl-C stops everything and leaves nothing behind.",
        ]
        with suppress(OSError):  # the terminal was closed, and its signal follows
            self._out.print(Text("\n".join(lines)))
