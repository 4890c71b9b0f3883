"""One router: its servers, its view of the fleet, its life from start to drain."""

import asyncio
import gc
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

from common.address import host_port
from common.beat import Beat
from common.logs import configure_logging
from common.metrics_server import MetricsServer
from common.tls import Certificates, TlsError
from router.admin import Admin
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.http import HttpFront
from router.metrics import RouterMetrics
from router.service import GrpcFront

log = logging.getLogger(__name__)

_HEALTH_PERIOD_S = 0.25
_NEW_OBJECTS = 10_000  # some MB
_CATCH_UP_S, _CATCH_UP_LOOK_S = 30.0, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where a router listens."""

    http: str  # URL
    grpc: str  # host:port
    metrics: str | None  # URL, where it has a port of its own


class Router:
    """A router in this event loop. Raises ``TlsError`` when a certificate cannot be used."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics = RouterMetrics()
        self._certificates = Certificates(config.tls_files) if config.tls_files is not None else None
        if self._certificates is not None:
            self.metrics.tls_expiry.labels("server").set_function(self._certificates.expires_s)
        self.fleet = Fleet(config, self.metrics)
        self.dispatcher = Dispatcher(config, self.fleet, self.metrics)
        admin = Admin(self.fleet, self.dispatcher)
        self._grpc = GrpcFront(config, self.fleet, self.dispatcher, admin, self.metrics, self._certificates)
        self._http = HttpFront(config, self.fleet, self.dispatcher, admin, self.metrics, self._certificates)
        self._metrics_server: MetricsServer | None = None
        self.beat = Beat(config.alive_file, self._tell_state)
        self._listens = False
        self._beating: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Endpoints:
        """Follow the fleet and listen. Raises ``OSError`` when a port cannot be had.

        Who connects to a port that several routers share meets any of them: this one joins them once it can answer.
        """
        host = self.config.listen
        self._beating = asyncio.create_task(self.beat.run())
        try:
            metrics_url = None
            if self.config.metrics_port is not None:
                self._metrics_server = MetricsServer(
                    self.metrics.registry,
                    self._http.why_not_ready,
                    self.beat.why_dead,
                    address=host,
                    port=self.config.metrics_port,
                )
                metrics_url = f"http://{host_port(host, self._metrics_server.port)}/metrics"
            await self.fleet.start()
            if self.config.reuse_port:
                await self._catch_up()
            http_port = await self._http.start()
            grpc_port = await self._grpc.start()
            self._listens = True
        except BaseException:
            await self.stop()
            raise
        self._tasks = [asyncio.create_task(self._tell_health())]
        if self._certificates is not None:
            self._tasks.append(asyncio.create_task(self._certificates.follow()))
        http, grpc = host_port(host, http_port), host_port(host, grpc_port)
        log.info("router listens http=%s grpc=%s", http, grpc)
        scheme = "https" if self._certificates is not None else "http"
        return Endpoints(http=f"{scheme}://{http}", grpc=grpc, metrics=metrics_url)

    async def _catch_up(self) -> None:
        """Wait until this router can answer what others can, but not for ever: perhaps there are none."""
        end_s = time.monotonic() + _CATCH_UP_S
        while True:
            knows_all = self.fleet.is_online and not self.fleet.is_behind
            if knows_all or time.monotonic() > end_s:
                return
            await asyncio.sleep(_CATCH_UP_LOOK_S)

    def _tell_state(self) -> str:
        """For whoever keeps it running: STARTING or READY, and why it cannot answer requests, if so."""
        state = "STARTING" if not self._listens or self.fleet.is_behind else "READY"
        return f"{state} {self._http.why_not_ready()}"

    async def drain(self) -> None:
        """Say "not ready", serve on until load balancers have seen it, let what runs end, then close everything."""
        self._http.begin_drain()
        await self._end_tasks()
        await self._grpc.set_ready(False)
        await asyncio.sleep(self.config.drain_notice_s)
        await self.stop()

    async def stop(self) -> None:
        """Close the ports; running answers have the drain timeout to end."""
        await self._end_tasks()
        self.dispatcher.queue.begin_drain(self.config.drain_deadline_s / 2)
        await asyncio.gather(self._http.stop(), self._grpc.stop(self.config.drain_deadline_s))
        await self.fleet.stop()
        if self._metrics_server is not None:
            self._metrics_server.stop()
        if self._beating is not None:
            self._beating.cancel()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell_health(self) -> None:
        was_ready = False
        while True:
            is_ready = not self.fleet.why_not_ready()
            if is_ready != was_ready:
                await self._grpc.set_ready(is_ready)
                was_ready = is_ready
            await asyncio.sleep(_HEALTH_PERIOD_S)


def settle_collector() -> None:
    """Tell Python's collector of cycles that what is there now stays, and that 700 new objects are no reason to look.

    Requests leave hardly any cycles, and looking for them was a twentieth of what a request costs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


async def serve(config: RouterConfig, stop: asyncio.Event, ready: Callable[[Endpoints], None] | None = None) -> None:
    """Run a router until ``stop`` is set, then drain it. ``ready`` is told once its servers listen."""
    router = Router(config)
    starting, stopping = asyncio.create_task(router.start()), asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        if starting.cancelled():  # a Redis call may swallow it
            return
    endpoints = starting.result()
    settle_collector()
    if ready is not None:
        ready(endpoints)
    await stop.wait()
    log.info("router drains")
    await router.drain()


def run_router(config: RouterConfig, ready: Callable[[Endpoints], None] | None = None) -> int:
    """Run a router in the foreground until SIGTERM or SIGINT; its exit code.

    0 after a drain, 2 when a port cannot be had or a certificate cannot be used. A second signal ends it at once.
    """
    configure_logging(as_json=config.log_json, level=config.log_level)

    async def run() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        for number in signals:
            loop.add_signal_handler(number, _on_signal, number, stop)
        try:
            await serve(config, stop, ready)
        except (OSError, TlsError) as error:
            log.error("%s", error)
            return 2
        finally:
            for number in signals:
                loop.remove_signal_handler(number)  # uvloop leaves them to a closed loop, which hears nothing
        return 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def _on_signal(number: int, stop: asyncio.Event) -> None:
    if stop.is_set():
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    stop.set()
