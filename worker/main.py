"""One worker process from its first log line to its exit code.

    STARTING    listens, has a lease, loads the model
    WARMING     joined the fleet; takes synthetic traffic
    READY       takes all traffic
    DRAINING    refuses new requests; those that run may end until the drain deadline
    GONE        everything of it is removed from Redis

Exit codes: 0 drained as asked, 1 it failed, 2 wrong use or environment. The last line of the log says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from warmfront_pb.v1 import common_pb2

from cache.block_hash import HashScheme
from cache.prefix_cache import PrefixCache
from common.address import host_port
from common.beat import Beat
from common.logs import configure_logging
from common.metrics_server import MetricsServer
from common.tls import Certificates
from common.worker_token import tokens_of
from worker.adapters import Adapters
from worker.config import ConfigError, WorkerConfig
from worker.detokenizer import TokenTable
from worker.engine import Engine
from worker.metrics import WorkerMetrics
from worker.prewarm import Prewarm, RedisSource
from worker.replica import Loaded, Progress, Replica
from worker.reporter import ContractMismatchError, FencedError, RegistryError, Reporter
from worker.request import StepReport
from worker.scheduler import Limits
from worker.server import WorkerServer
from worker.service import WorkerService
from worker.step_times import HUNG_AFTER_S

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_WRONG_USE = 0, 1, 2
_WATCH_PERIOD_S = 0.25
_CUT_GRACE_S = 2.0  # for what was cut at the drain deadline to hear of it

Loader: TypeAlias = Callable[[WorkerConfig, Progress], Loaded]


def run_workers(configs: Sequence[WorkerConfig], ready: Callable[[str], None] | None = None) -> int:
    """Run until SIGTERM, SIGINT, a drain call or a fault; the exit code, of several the worst.

    ``ready`` gets the address (host:port) of each once it is READY. Several replicas in one process, each with its own
    port, lease and engine, are for engines that take no device: simulated ones.
    """
    configure_logging(as_json=configs[0].log_json, level=configs[0].log_level)
    return asyncio.run(_run(configs, ready))


def loader_of(config: WorkerConfig) -> Loader:
    """What makes the engine that ``config`` asks for. A simulated one needs neither torch nor a model."""
    if config.engine == "simulated":
        from worker.simulated import load_simulated

        return load_simulated
    from worker.boot import load_replica

    return load_replica


async def _run(configs: Sequence[WorkerConfig], ready: Callable[[str], None] | None) -> int:
    workers = [Worker(config) for config in configs]

    def drain() -> None:
        for worker in workers:
            worker.drain()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    return max(await asyncio.gather(*(worker.run(ready) for worker in workers)))


class Worker:
    """One replica in the running event loop. ``run`` is its life; ``drain`` ends it in good order."""

    def __init__(
        self,
        config: WorkerConfig,
        load: Loader | None = None,
        *,
        hung_after_s: float = HUNG_AFTER_S,
        num_metrics_ports: int = 1,
    ) -> None:
        """``num_metrics_ports``: it takes the first free one of so many, for others of its machine have its setting."""
        self._config = config
        self._num_metrics_ports = num_metrics_ports
        self._hung_after_s = hung_after_s
        self._load = load
        self.replica = Replica(
            config=config,
            scheme=HashScheme(config.prefix_caching_hash_algo, config.block_size, config.hash_seed),
        )
        self._service = WorkerService(self.replica, self.drain)
        self._server = WorkerServer(self._service, tokens_of(config.worker_token))
        self.beat = Beat()
        self._certificates: Certificates | None = None
        self._following: asyncio.Task[None] | None = None  # the files of the certificates
        self.listens = asyncio.Event()  # the address stands and Redis answers; the model is still to be loaded
        self.is_fenced = False  # a newer boot holds this replica's id: this one has stopped and wants no other try
        self._drain_asked = asyncio.Event()
        self._drain_deadline_s = config.drain_deadline_s
        self._death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._engine: Engine | None = None
        self._reporter: Reporter | None = None
        self._metrics: WorkerMetrics | None = None
        self._metrics_server: MetricsServer | None = None
        self._event_lag_s = 0.0
        self._last_progress: tuple[str, int | None] = ("", None)

    def drain(self, deadline_s: float | None = None) -> None:
        """Take no more requests and end when those that run have ended, or at the deadline. Twice is once."""
        if deadline_s is not None:
            self._drain_deadline_s = deadline_s
        self._drain_asked.set()
        if self.replica.state in (common_pb2.WARMING, common_pb2.READY):
            self._set_state(common_pb2.DRAINING)

    async def run(self, ready: Callable[[str], None] | None = None) -> int:
        """From start to exit code. What goes wrong is logged, not raised."""
        beating = asyncio.create_task(self.beat.run(), name="beat")
        try:
            return await self._live(ready)
        finally:
            beating.cancel()

    async def _live(self, ready: Callable[[str], None] | None) -> int:
        reporting: asyncio.Task[None] | None = None
        try:
            self._check_files_exist()
            await self._listen()
            self._reporter = self._make_reporter()
            await self._reporter.connect()
            self.listens.set()
            reporting = asyncio.create_task(self._reporter.run(), name="reporter")
            if await self._start(reporting, ready):
                await self._until_something_ends(reporting)
            return await self._close_down(EXIT_OK, reporting)
        except (ValueError, OSError, RegistryError, ContractMismatchError, ModuleNotFoundError) as error:
            code, reason = EXIT_WRONG_USE, str(error)
        except FencedError as error:
            code, reason, self.is_fenced = EXIT_FAILED, str(error), True
        except Exception as error:
            logger.exception("the worker failed")
            code, reason = EXIT_FAILED, str(error) or type(error).__name__
        self.replica.fault = reason
        await self._close_down(code, reporting)
        logger.error("replica=%s exit_code=%d: %s", self._config.replica_id, code, reason)
        return code

    # Up

    def _check_files_exist(self) -> None:
        """Before anything is registered: a worker that cannot serve takes no id from one that does."""
        model = self._config.model
        if self._config.engine == "model" and model is not None and not model.exists():
            raise ConfigError(f"--model {model}: there is no such file or folder")
        for flag, folder in self._config.adapter_folders:
            if not folder.is_dir():
                raise ConfigError(f"{flag}: there is no folder {folder}")

    async def _listen(self) -> None:
        config = self._config
        if config.tls_files is not None:
            self._certificates = Certificates(config.tls_files)
            self._following = asyncio.create_task(self._certificates.follow(), name="certificates")
        port = await self._server.start(config.listen, config.port, self._certificates)
        host = config.advertise or config.listen
        self.replica.address = host if _has_port(host) else host_port(host, port)

    def _make_reporter(self) -> Reporter:
        config = self._config
        return Reporter(
            config.redis_url,
            fleet=config.fleet,
            replica_id=config.replica_id,
            generation=self.replica.generation,
            heartbeat_s=config.heartbeat_s,
            lease_s=config.lease_s,
            lease=self._service.lease,
            redis_password_file=config.redis_password_file,
        )

    async def _start(self, reporting: asyncio.Task[None], ready: Callable[[str], None] | None) -> bool:
        """Load, join, become READY; false when a drain was asked for meanwhile."""
        loading = _in_thread(self._load_model)
        drained = asyncio.create_task(self._drain_asked.wait())
        await _first_of(loading, reporting, drained)
        drained.cancel()
        if self._drain_asked.is_set():
            loading.cancel()
            return False
        if reporting.done():
            reporting.result()
        loaded = await loading
        reporter = self._reporter
        assert reporter is not None
        # Where no longest context was asked for the fleet's is as good, if this worker's pool holds it.
        is_free = self._config.max_model_len is None
        agreed = await reporter.join(self.replica.contract_of(loaded.card), may_shorten=is_free)
        if agreed.max_model_len != loaded.card.max_model_len:
            logger.info(
                "max_model_len=%d: the fleet's; the pool holds %d", agreed.max_model_len, loaded.card.max_model_len
            )
            loaded = replace(loaded, card=replace(loaded.card, max_model_len=agreed.max_model_len))
        self.replica.card = loaded.card
        self.replica.max_num_batched_tokens = loaded.max_num_batched_tokens
        self.replica.host_tokens_per_s = loaded.host_tokens_per_s
        adapters = self._start_engine(loaded, reporter)
        for name, folder in self._config.own_adapters.items():
            if not self._drain_asked.is_set():
                await adapters.load_own(name, folder)
        if self._drain_asked.is_set():
            return False
        self._set_state(common_pb2.WARMING)
        if not await self._prewarm(loaded, adapters, reporting):
            return False
        self._set_state(common_pb2.READY)
        await self._server.set_serving(True)
        logger.info(
            "replica=%s state=READY address=%s generation=%s model=%s kv_blocks=%d host_kv_blocks=%d "
            "max_model_len=%d mode=%s dtype=%s",
            self._config.replica_id,
            self.replica.address,
            self.replica.generation,
            loaded.card.name,
            loaded.num_blocks - 1,
            self._config.num_host_blocks,
            loaded.card.max_model_len,
            self._config.mode,
            loaded.card.dtype,
        )
        if ready is not None:
            ready(self.replica.address)
        return True

    async def _prewarm(self, loaded: Loaded, adapters: Adapters, reporting: asyncio.Task[None]) -> bool:
        """Compute the fleet's hot prefixes, for as long as that may take; false when a drain was asked for."""
        config, engine = self._config, self._engine
        assert engine is not None
        if not (config.prewarm and config.enable_prefix_caching):
            return True
        started_s = time.monotonic()
        prewarm = Prewarm(
            engine,
            adapters,
            RedisSource(
                config.redis_url,
                config.fleet,
                password_file=config.redis_password_file,
                also_fleet=config.prewarm_from_fleet,
                own_replica=config.replica_id,
            ),
            tokenizer=loaded.card.tokenizer_fingerprint,
            block_size=config.block_size,
            max_model_len=loaded.card.max_model_len,
            vocab_size=loaded.card.vocab_size,
            target=config.prewarm_target,
        )
        warming = asyncio.create_task(prewarm.run(), name="prewarm")
        drained = asyncio.create_task(self._drain_asked.wait())
        ends = (warming, drained, reporting, self._death)
        await asyncio.wait(ends, timeout=config.prewarm_deadline_s, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        if not warming.done():  # a Redis call may swallow this: nobody waits for it
            prewarm.progress.ended = "drained" if self._drain_asked.is_set() else "deadline"
            prewarm.stop()
            warming.cancel()
        progress = prewarm.progress
        logger.info(
            "replica=%s prewarm ended=%r share=%.3f prefixes=%d of=%d tokens=%d seconds=%.2f",
            *(config.replica_id, progress.ended, progress.share, progress.num_done, progress.num_prefixes),
            *(progress.num_tokens, time.monotonic() - started_s),
        )
        self._raise_fault(reporting)
        return not self._drain_asked.is_set()

    def _load_model(self) -> Loaded:
        return (self._load or loader_of(self._config))(self._config, self._log_progress)

    def _log_progress(self, what: str, share: float | None) -> None:
        """A line for each step, and for each tenth of one that knows how far it is."""
        percent = None if share is None else int(share * 10) * 10
        if (what, percent) != self._last_progress:
            self._last_progress = (what, percent)
            known = "" if percent is None else f" percent={percent}"
            logger.info("replica=%s state=STARTING doing=%r%s", self._config.replica_id, what, known)

    def _start_engine(self, loaded: Loaded, reporter: Reporter) -> Adapters:
        config = self._config
        self._event_lag_s = loaded.event_lag_s
        cache = PrefixCache(
            loaded.num_blocks,
            self.replica.scheme,
            config.enable_prefix_caching,
            replica=config.replica_id,
            generation=self.replica.generation,
            policy=config.eviction_policy,
            token_reuse_min=config.token_reuse_min if config.token_reuse else None,
            num_host_blocks=config.num_host_blocks,
        )
        table = TokenTable.from_tokenizer_json(loaded.card.tokenizer_json)
        engine = self._engine = Engine(
            runner=loaded.runner,
            cache=cache,
            limits=Limits(config.max_num_seqs, loaded.max_num_batched_tokens, config.max_queue),
            table=table,
            eos_token_ids=frozenset(loaded.card.eos_token_ids),
            on_step=self._on_step,
            on_death=self._on_death,
            hung_after_s=self._hung_after_s,
        )
        metrics = self._metrics = WorkerMetrics(
            view=engine.snapshot,
            now=time.monotonic(),
            compat=config.compat_metrics,
            host_tokens_per_s=loaded.host_tokens_per_s,
        )
        if self._certificates is not None:
            metrics.tell_expiry(self._certificates.expires_s)
        if config.metrics_port is not None:
            self._metrics_server = MetricsServer(
                metrics.registry,
                self._why_not_ready,
                self.beat.why_dead,
                address=config.listen,
                port=config.metrics_port,
                num_ports=self._num_metrics_ports,
            )
            logger.info("metrics=http://%s:%d/metrics", config.listen, self._metrics_server.port)
        adapters = Adapters(
            engine,
            loaded.adapter_reader,
            folders=config.lora_dir,
            max_adapters=config.max_loras,
            base=loaded.card.name,
            publish=reporter.publish,
        )
        self._service.open(engine, table, metrics, adapters)
        reporter.take_snapshot = engine.cache_snapshot
        engine.start()
        return adapters

    # While it runs

    def _why_not_ready(self) -> str:
        return "" if self.replica.state == common_pb2.READY else self.replica.state_name

    def _on_step(self, report: StepReport) -> None:
        assert self._metrics is not None
        assert self._reporter is not None
        self._metrics.observe(report, time.monotonic())
        if report.events is not None and self._event_lag_s:
            asyncio.get_running_loop().call_later(self._event_lag_s, self._reporter.put, report.events)
        elif report.events is not None:
            self._reporter.put(report.events)

    def _on_death(self, error: BaseException) -> None:
        if not self._death.done():
            self._death.set_result(error)

    async def _watch_engine(self) -> None:
        """Tell routers of a step that takes far too long, and end the process where it never ends.

        Its thread cannot be stopped.
        """
        assert self._engine is not None
        assert self._reporter is not None
        engine, was_hung = self._engine, False
        while engine.step_age_s() < self._config.step_limit_s:
            hung_s = engine.hung_s()
            if bool(hung_s) != was_hung:
                was_hung = not was_hung
                self._reporter.touch()
                logger.warning("replica=%s hung=%s step_age_s=%.1f", self._config.replica_id, was_hung, hung_s)
            await asyncio.sleep(min(_WATCH_PERIOD_S, self._config.step_limit_s / 10))
        error = TimeoutError(f"one step has lasted {engine.step_age_s():.0f} s")
        self._service.cut(str(error))
        self._on_death(error)

    def _set_state(self, state: common_pb2.ReplicaState) -> None:
        self.replica.state = state
        if self._reporter is not None:
            self._reporter.touch()

    async def _until_something_ends(self, reporting: asyncio.Task[None]) -> None:
        """Until a drain is asked for. Raises what ended the engine or the reporter."""
        drained = asyncio.create_task(self._drain_asked.wait())
        watching = asyncio.create_task(self._watch_engine())
        await _first_of(drained, reporting, self._death)
        drained.cancel()
        watching.cancel()
        self._raise_fault(reporting)

    def _raise_fault(self, reporting: asyncio.Task[None]) -> None:
        """Raises what ended the engine or the reporter, if either has ended."""
        if self._death.done():
            death = self._death.result()
            raise RuntimeError(f"the engine died of {type(death).__name__}: {death}") from death
        if reporting.done():
            reporting.result()

    # Down

    async def _close_down(self, code: int, reporting: asyncio.Task[None] | None) -> int:
        """Let requests end (not when the engine is dead), leave Redis, stop listening."""
        started_s = time.monotonic()
        if self.replica.state != common_pb2.DRAINING:
            self._set_state(common_pb2.DRAINING)
        await self._server.set_serving(False)
        if self._engine is not None and not self._death.done():
            logger.info("replica=%s state=DRAINING running=%d", self._config.replica_id, self._service.num_requests)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_deadline_s):
                    await self._service.wait_idle()
            num_cut = self._service.num_requests
            if not await asyncio.to_thread(
                self._engine.stop, 0.0 if self._engine.hung_s() else self._config.step_limit_s
            ):
                self._service.cut("the replica ends and its engine hangs")
            if num_cut:
                logger.warning("replica=%s cut=%d requests at the drain deadline", self._config.replica_id, num_cut)
        self.replica.state = common_pb2.GONE
        if self._reporter is not None:
            if reporting is not None:
                self._reporter.stop()
                await asyncio.wait([reporting])
                await self._reporter.leave()
            await self._reporter.close()
        await self._server.stop(_CUT_GRACE_S)
        if self._following is not None:
            self._following.cancel()
        if self._metrics_server is not None:
            self._metrics_server.stop()
        logger.info("replica=%s state=GONE seconds=%.1f", self._config.replica_id, time.monotonic() - started_s)
        return code


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _in_thread(function: Callable[[], Loaded]) -> asyncio.Future[Loaded]:
    """Run it in a daemon thread, which does not keep the process alive when nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Loaded] = loop.create_future()

    def settle(result: Loaded | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return future


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdigit() and (host.count(":") == 1 or host.startswith("["))
