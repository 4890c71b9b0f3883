"""A fleet on a Redis that sentinels watch, on a cluster, and with users of few rights: real processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.exceptions import RedisError

from common.redis_client import connect_redis
from router.config import RouterConfig
from router.main import Router
from router.registry import LeaseReader
from tests.fakes.authority import Authority, Pair
from tests.fakes.redis_servers import ClusterOf3, Server, Watched, servers
from tests.support import free_cluster_port, wait_until
from worker.config import WorkerConfig
from worker.main import Worker
from worker.prewarm import RedisSource
from worker.simulated import BYTES

ROOT = Path(__file__).resolve().parents[2]
_fleets = itertools.count()


@pytest.fixture
def started() -> Iterator[list[Server]]:
    with servers() as own:
        yield own


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterOf3]:
    with servers() as own:
        yield ClusterOf3(tmp_path_factory.mktemp("cluster"), own)


class Fleet:
    """Two workers and a router on one Redis, and a client of the router."""

    def __init__(self, name: str, workers: list[Worker], router: Router, client: httpx.AsyncClient) -> None:
        self.name, self.workers, self.router, self.client = name, workers, router, client

    async def complete(self, prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 3}
        return (await self.client.post("/v1/completions", json=body)).status_code

    def index_is_true(self) -> bool:
        index = self.router.fleet.index
        return self.router.fleet.mirror.online and all(
            index.num_blocks(worker.replica.config.replica_id) == worker._engine.snapshot().num_cached_blocks
            for worker in self.workers
        )

    async def until_the_index_is_true(self) -> None:
        async with asyncio.timeout(60):
            while not self.index_is_true():
                await asyncio.sleep(0.05)


@asynccontextmanager
async def fleet_on(
    worker_url: str, router_url: str | None = None, *, name: str | None = None, **more: Any
) -> AsyncIterator[Fleet]:
    name = name or f"fleet-{next(_fleets)}"
    timing = {"heartbeat_s": 0.2, "lease_s": 4.0}
    configs = [
        WorkerConfig(
            replica_id=f"w{number}",
            redis_url=worker_url,
            fleet=name,
            engine="simulated",
            model=BYTES,
            kv_blocks=256,
            decode_time_s=0.0,
            **timing,
            **more.get("worker", {}),
        )
        for number in range(2)
    ]
    workers = [Worker(config) for config in configs]
    ready = [asyncio.Event() for _ in workers]
    running = [
        asyncio.create_task(worker.run(lambda _, event=event: event.set()))
        for worker, event in zip(workers, ready, strict=True)
    ]
    router = Router(
        RouterConfig(
            redis_url=router_url or worker_url,
            fleet=name,
            http_port=0,
            grpc_port=0,
            hot_max_age_s=60.0,
            **timing,
            **more.get("router", {}),
        )
    )
    client = None
    try:
        async with asyncio.timeout(60):
            for event, task in zip(ready, running, strict=True):
                waiting = asyncio.create_task(event.wait())
                await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                assert not task.done(), "a worker ended"
            client = httpx.AsyncClient(base_url=(await router.start()).http, timeout=60)
            while len(router.fleet.ready) < 2 or router.fleet.why_not_ready():
                await asyncio.sleep(0.05)
        yield Fleet(name, workers, router, client)
    finally:
        if client is not None:
            await client.aclose()
        await router.stop()
        for worker in workers:
            worker.drain(0.0)
        await asyncio.gather(*running)


def prompts() -> Iterator[str]:
    for number in itertools.count():
        yield f"{number:04d} once upon a time there was a request " * 3


async def test_a_fleet_on_a_cluster_has_its_keys_on_one_node(cluster: ClusterOf3) -> None:
    names = ["first", "second", "third-fleet"]
    assert len({cluster.slot(name) for name in names}) == 3
    async with fleet_on(cluster.url, name=names[0]) as fleet:
        for prompt in itertools.islice(prompts(), 10):
            assert await fleet.complete(prompt) == 200
        await fleet.until_the_index_is_true()
        assert fleet.router.fleet.index.num_blocks("w0") + fleet.router.fleet.index.num_blocks("w1") > 0
        holders = [node for node in cluster.nodes if any(names[0] in str(key) for key in node.ask("KEYS", "*"))]
        assert holders == [cluster.owner(names[0])]


async def test_hot_prefixes_of_a_fleet_on_another_node_are_found(cluster: ClusterOf3) -> None:
    by_node: dict[int, str] = {}
    for number in range(60):
        name = f"fleet-{number}"
        by_node.setdefault((cluster.slot(name) > 5460) + (cluster.slot(name) > 10922), name)
    assert len(by_node) == 3
    source = RedisSource(cluster.url, by_node[0], also_fleet=by_node[1])
    found, now_ms = await source.sets()
    assert (found, now_ms > 0) == ([], True)
    assert await source.pressure() == "no other replica is ready"
    await source.close()


async def test_a_slot_that_moves_to_another_node_is_followed(cluster: ClusterOf3) -> None:
    slot = cluster.slot("moving")
    client: Any = connect_redis(cluster.url, fleet="moving", timeout_s=2.0)
    key = "wf:{moving}:x"
    await client.set(key, b"1")
    old = cluster.owner("moving")
    new = next(node for node in cluster.nodes if node is not old)
    new_id = new.ask("CLUSTER", "MYID")
    await client.delete(key)
    for node in cluster.nodes:
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", new_id.decode())
    with pytest.raises(Exception, match="has lost the keys"):
        await client.set(key, b"2")
    await client.set(key, b"3")
    assert cluster.owner("moving") is new
    await client.aclose()


@pytest.mark.slow
async def test_no_request_fails_while_a_sentinel_moves_the_master(tmp_path: Path, started: list[Server]) -> None:
    watched = Watched(tmp_path, started)
    async with fleet_on(watched.url) as fleet:
        prompt = prompts()
        codes = [await fleet.complete(next(prompt)) for _ in range(10)]
        await fleet.until_the_index_is_true()
        watched.master.kill()
        async with asyncio.timeout(90):
            while fleet.router.fleet._registry.online:
                codes.append(await fleet.complete(next(prompt)))
            while not (fleet.router.fleet._registry.online and fleet.index_is_true()):
                codes.append(await fleet.complete(next(prompt)))
                await asyncio.sleep(0.02)
        codes += [await fleet.complete(next(prompt)) for _ in range(10)]
        await fleet.until_the_index_is_true()
        assert set(codes) == {200}
        assert len(codes) > 30
        assert watched.replica.ask("ROLE")[0] == b"master"
        watched.master.start_again()  # a sentinel makes it a replica of the new one: nobody may write there
        codes.append(await fleet.complete(next(prompt)))
        await fleet.until_the_index_is_true()
        assert codes[-1] == 200


@pytest.mark.slow
async def test_no_request_fails_while_a_cluster_promotes_a_replica(tmp_path: Path, started: list[Server]) -> None:
    cluster = ClusterOf3(tmp_path, started, with_replicas=True)
    async with fleet_on(cluster.url) as fleet:
        prompt = prompts()
        codes = [await fleet.complete(next(prompt)) for _ in range(10)]
        await fleet.until_the_index_is_true()
        owner = cluster.owner(fleet.name)
        owner.kill()
        async with asyncio.timeout(90):
            while fleet.router.fleet._registry.online:
                codes.append(await fleet.complete(next(prompt)))
            while not (fleet.router.fleet._registry.online and fleet.index_is_true()):
                codes.append(await fleet.complete(next(prompt)))
                await asyncio.sleep(0.02)
        codes += [await fleet.complete(next(prompt)) for _ in range(10)]
        await fleet.until_the_index_is_true()
        assert set(codes) == {200}
        assert len(codes) > 30
        assert cluster.replicas[owner].ask("ROLE")[0] == b"master"


async def test_the_sentinels_are_asked_one_after_the_other(tmp_path: Path, started: list[Server]) -> None:
    watched = Watched(tmp_path, started)
    watched.sentinels[0].kill()
    client = connect_redis(watched.url, fleet="any", timeout_s=2.0)
    assert await client.ping()
    await client.aclose()
    unknown = connect_redis(watched.url.replace("/fleet/", "/other/"), fleet="any", timeout_s=2.0)
    with pytest.raises(Exception, match="knows no master 'other'"):
        await unknown.ping()
    await unknown.aclose()


async def test_servers_with_passwords_of_their_own(
    tmp_path: Path, started: list[Server], caplog: pytest.LogCaptureFixture
) -> None:
    data, watch = tmp_path / "data", tmp_path / "watch"
    data.write_text("data-password\n")
    watch.write_text("watch-password\n")
    master = Server(tmp_path, ["requirepass data-password"])
    lines = [
        f"sentinel monitor main 127.0.0.1 {master.port} 1",
        "sentinel auth-pass main data-password",
        "requirepass watch-password",
    ]
    sentinel = Server(tmp_path, lines, sentinel=True)
    started += [master, sentinel]
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main?sentinel_password_file={watch}"
    client: Any = connect_redis(url, fleet="any", timeout_s=2.0, password_file=data)
    assert await client.ping()
    # A new password counts from the next connection on.
    master.ask("CONFIG", "SET", "requirepass", "new-password", password="data-password")
    data.write_text("new-password\n")
    await client.connection_pool.disconnect()
    assert await client.ping()
    await client.aclose()
    assert not [one for one in caplog.records if one.name.startswith("redis")]  # it warns of what it has no use for


@asynccontextmanager
async def behind_tls(port: int, server: Pair, clients: Path | None = None) -> AsyncIterator[int]:
    """A port that speaks TLS and passes everything on to ``port``: the Valkey at hand has no TLS of its own."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(clients) if clients else None)
    context.load_cert_chain(server.cert, server.key)
    context.verify_mode = ssl.CERT_REQUIRED if clients else ssl.CERT_NONE
    open_ones: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        open_ones.extend((writer, inner_writer))

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
            target.close()

        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
    yield proxy.sockets[0].getsockname()[1]
    for writer in open_ones:
        writer.close()
    proxy.close()


async def test_a_fleet_reaches_redis_over_tls_and_shows_a_certificate(tmp_path: Path, started: list[Server]) -> None:
    authority = Authority(tmp_path)
    store = Server(tmp_path)
    started.append(store)
    own = authority.issue("own", "warmfront")
    async with behind_tls(store.port, authority.issue("redis"), authority.ca) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.ca}&ssl_certfile={own.cert}&ssl_keyfile={own.key}"
        async with fleet_on(url) as fleet:
            assert await fleet.complete("once upon a time") == 200
            await fleet.until_the_index_is_true()
        for wrong in (f"rediss://127.0.0.1:{port}", url.partition("&")[0]):
            client = connect_redis(wrong, fleet="any", timeout_s=2.0)
            with pytest.raises(RedisError):
                await client.ping()
            await client.aclose()


async def test_a_cluster_s_nodes_are_reached_over_tls(tmp_path: Path, started: list[Server]) -> None:
    authority = Authority(tmp_path)
    port = free_cluster_port()
    async with behind_tls(port, authority.issue("redis")) as tls_port:
        announced = ["cluster-enabled yes", f"cluster-announce-port {tls_port}"]
        node = Server(tmp_path, announced, port=port)
        started.append(node)
        node.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: "cluster_state:ok" in str(node.ask("CLUSTER", "INFO")), "the cluster is whole")
        url = f"rediss+cluster://127.0.0.1:{tls_port}?ssl_ca_certs={authority.ca}"
        client: Any = connect_redis(url, fleet="any", timeout_s=5.0)
        assert await client.set("wf:{any}:x", b"1")
        assert client.connection_pool._available_connections[0].port == tls_port
        await client.aclose()


async def test_a_server_is_known_by_its_name_unless_the_url_says_otherwise(
    tmp_path: Path, started: list[Server]
) -> None:
    authority = Authority(tmp_path)
    store = Server(tmp_path)
    started.append(store)
    async with behind_tls(store.port, authority.issue("redis", "redis.example")) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.ca}"
        client = connect_redis(url, fleet="any", timeout_s=2.0)
        with pytest.raises(RedisError, match="certificate verify failed"):
            await client.ping()
        await client.aclose()
        client = connect_redis(f"{url}&ssl_check_hostname=false", fleet="any", timeout_s=2.0)
        assert await client.ping()
        await client.aclose()


def documented_users() -> dict[str, str]:
    """The ACL lines of docs/operations.md, by user."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    return {found[1]: found[0].strip() for found in re.finditer(r"^ {4}user (\S+) .+$", text, re.MULTILINE)}


async def test_the_documented_rights_suffice_for_each_part_and_no_more_than_that(
    tmp_path: Path, started: list[Server]
) -> None:
    users = documented_users()
    assert users.keys() == {"router", "worker", "reader"}
    secrets = {name: f"{name}-password" for name in users}
    acl = tmp_path / "users.acl"
    lines = [line.replace("#SHA256", f">{secrets[name]}").replace("FLEET", "acl") for name, line in users.items()]
    acl.write_text("\n".join([*lines, "user default off", "user admin on >admin ~* +@all"]) + "\n")
    server = Server(tmp_path, [f"aclfile {acl}"])
    started.append(server)

    def url(user: str) -> str:
        return f"redis://{user}:{secrets[user]}@127.0.0.1:{server.port}/0"

    async with fleet_on(url("worker"), url("router"), name="acl") as fleet:
        second = Router(
            RouterConfig(redis_url=url("router"), fleet="acl", http_port=0, grpc_port=0, heartbeat_s=0.2, lease_s=4.0)
        )
        await second.start()
        for prompt in itertools.islice(prompts(), 5):
            for _ in range(3):
                assert await fleet.complete(prompt) == 200
        await fleet.until_the_index_is_true()
        admin: Any = connect_redis(f"redis://admin:admin@127.0.0.1:{server.port}/0", fleet="acl", timeout_s=2.0)
        async with asyncio.timeout(60):
            while not await admin.exists("wf:{acl}:hot"):
                await asyncio.sleep(0.05)
        await admin.flushall()  # contract and snapshots are written anew, routers ask for them
        async with asyncio.timeout(60):
            while not await admin.exists("wf:{acl}:contract", "wf:{acl}:hot"):
                await asyncio.sleep(0.05)
        await fleet.until_the_index_is_true()
        streams = [key async for key in admin.scan_iter("wf:{acl}:events:w0:*")]
        for key in ("wf:{acl}:dispatch", "wf:{acl}:routers", "wf:{acl}:hot", *streams):  # of a wrong type: made anew
            await admin.set(key, b"rubbish")
        assert await fleet.complete("a request that leaves blocks and steps " * 4) == 200
        async with asyncio.timeout(60):
            for key in ("wf:{acl}:routers", "wf:{acl}:hot", *streams):
                while await admin.type(key) == b"string":
                    await fleet.complete("once upon a time there was another " * 4)
                    await asyncio.sleep(0.1)
        await fleet.until_the_index_is_true()
        leases = await asyncio.to_thread(LeaseReader(url("reader"), None, "acl").read)  # the controller's
        assert leases is not None
        assert {lease.replica for lease in leases} == {"w0", "w1"}
        source = RedisSource(url("reader"), "acl")
        await source.sets()
        await source.pressure()
        await source.close()
        await second.stop()
    async with fleet_on(url("worker"), url("router"), name="acl"):
        pass  # pre-warm finds what the first ones have left
    assert list(await admin.execute_command("ACL", "LOG")) == []

    for user, words in (
        ("worker", ("GET", "wf:{acl}:load:r1")),
        ("worker", ("SET", "wf:{acl}:hot:r1", "x")),
        ("worker", ("GET", "wf:{other}:contract")),
        ("worker", ("FLUSHALL",)),
        ("router", ("SET", "wf:{acl}:contract", "x")),
        ("router", ("XADD", "wf:{acl}:events:w0:1", "*", "b", "x")),
        ("router", ("KEYS", "*")),
        ("reader", ("DEL", "wf:{acl}:hot")),
        ("reader", ("GET", "wf:{acl}:events:w0:1")),
    ):
        client: Any = connect_redis(url(user), fleet="acl", timeout_s=2.0)
        with pytest.raises(Exception, match=r"(?i)no permission"):
            await client.execute_command(*words)
        await client.aclose()
    await admin.aclose()
