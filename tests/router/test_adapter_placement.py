"""Adapters through a router: loaded on every replica by one call, placed only where they are, never mixed up."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import grpc
import pytest
import redis.asyncio
from warmfront_pb.v1 import common_pb2

from cache.adapter import Adapter, is_adapter_name
from router.lora import Adapters
from tests.router.conftest import Cluster
from tests.router.reflective import ReflectiveClient
from tests.support import until

BODY: dict[str, Any] = {"prompt": "once upon a time " * 4, "max_tokens": 4, "seed": 7, "temperature": 0}


def version_of(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


@pytest.fixture
async def three(cluster: Cluster) -> Cluster:
    """Three replicas and two routers."""
    for name in ("w0", "w1", "w2"):
        await cluster.add_worker(name, lease_s=10.0)  # one that stops is still listed for a while
    await cluster.add_router()
    await cluster.add_router()
    return cluster


async def load(cluster: Cluster, name: str, path: str, status: int = 200, **more: Any) -> dict[str, Any]:
    response = await cluster.http.post("/v1/lora", json={"name": name, "path": path, **more})
    assert response.status_code == status, response.text
    result: dict[str, Any] = response.json()
    return result


async def ask(cluster: Cluster, router: int = 0, **more: Any) -> Any:
    return await cluster.clients[router].post("/v1/completions", json={**BODY, **more})


def texts(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def test_every_replica_loads_and_every_router_places_at_once(three: Cluster) -> None:
    told = await load(three, "french", "/a/1")
    assert told["complete"]
    assert [(one["replica"], one["outcome"], one["version"], one["rank"]) for one in told["replicas"]] == [
        (name, "loaded", version_of("/a/1"), 8) for name in ("w0", "w1", "w2")
    ]
    base = texts(await ask(three))
    for router in (1, 0):  # the one that was not asked to load it knows as well
        by_field, by_model = await ask(three, router, lora="french"), await ask(three, router, model="french")
        assert texts(by_field) == texts(by_model) != base
        assert by_model.json()["model"] == "french"
        assert texts(await ask(three, router, model="french", lora="french")) == texts(by_field)
    again = await load(three, "french", "/a/1")
    assert {one["outcome"] for one in again["replicas"]} == {"already_loaded"}


async def test_what_was_loaded_through_another_router_a_moment_ago_is_found(cluster: Cluster) -> None:
    await cluster.add_worker("w0")
    await cluster.add_router(heartbeat_s=60.0, lease_s=300.0)  # it looks at leases every 15 s
    await cluster.add_router()
    loaded = await cluster.clients[1].post("/v1/lora", json={"name": "sql", "path": "/adapters/sql"})
    assert loaded.status_code == 200
    answer = await cluster.clients[0].post("/v1/completions", json={"model": "sql", "prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200, answer.text


async def test_requests_go_only_where_the_adapter_is_and_stick_to_its_cache(three: Cluster) -> None:
    assert (await load(three, "a", "/a", replica="w1"))["replicas"][0]["replica"] == "w1"
    answers = [await ask(three, router, lora="a") for router in (0, 1) for _ in range(6)]
    assert {answer.headers["x-warmfront-replica"] for answer in answers} == {"w1"}
    assert answers[0].json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await until(three.index_is_true)
    warm = await ask(three, 1, lora="a")
    cached = warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 64 == int(warm.headers["x-warmfront-matched-tokens"])
    # The base model shares nothing with it.
    assert (await ask(three)).headers["x-warmfront-matched-tokens"] == "0"


async def test_within_an_adapter_the_prefix_decides(three: Cluster) -> None:
    await load(three, "a", "/a")
    home = (await ask(three, lora="a")).headers["x-warmfront-replica"]
    await until(three.index_is_true)
    answers = [await ask(three, router, lora="a") for router in (0, 1, 0, 1)]
    assert {answer.headers["x-warmfront-replica"] for answer in answers} == {home}
    assert {answer.headers["x-warmfront-matched-tokens"] for answer in answers} == {"64"}


async def test_other_weights_under_the_old_name_never_meet_old_blocks(three: Cluster) -> None:
    await load(three, "a", "/v1")
    first = texts(await ask(three, lora="a"))
    told = await load(three, "a", "/v2", status=207)
    assert {one["outcome"] for one in told["replicas"]} == {"conflict"}
    gone = await three.http.delete("/v1/lora/a")
    assert (gone.status_code, gone.json()["complete"]) == (200, True)
    assert {one["outcome"] for one in gone.json()["replicas"]} == {"unloaded"}
    for router in (0, 1):
        assert (await ask(three, router, lora="a")).status_code == 404
    await load(three, "a", "/v2")
    await until(three.index_is_true)
    for router in (1, 0):
        answer = await ask(three, router, lora="a", prompt=f"{router}" + BODY["prompt"])
        assert answer.headers["x-warmfront-matched-tokens"] == "0"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert texts(await ask(three, lora="a")) != first


async def test_an_unknown_adapter_is_404_by_its_name_whichever_way_it_is_asked_for(three: Cluster) -> None:
    await load(three, "french", "/a")
    for more, words, code in (
        ({"lora": "german"}, "no adapter 'german' is loaded; loaded: french", "not_found"),
        ({"model": "german"}, "use 'simulated' or 'french'", "model_not_found"),
        ({"model": "german", "lora": "french"}, "model 'german' is not served here", "model_not_found"),
    ):
        answer = await ask(three, **more)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
        assert words in answer.json()["error"]["message"]
    client = ReflectiveClient(three.endpoints[0].grpc)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call("warmfront.v1.Inference/Generate", {"text": "x", "lora": "german"})
    assert (caught.value.code(), "german" in (caught.value.details() or "")) == (grpc.StatusCode.NOT_FOUND, True)
    await client.channel.close()
    assert three.load == 0


async def test_a_very_long_name_is_not_repeated_whole(cluster: Cluster) -> None:
    await cluster.add_worker("w0")
    await cluster.add_router()
    name = "\N{LATIN SMALL LETTER E WITH ACUTE}" * 200_000
    for more in ({"lora": name}, {"model": name}):
        answer = await ask(cluster, **more)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 404 and len(message.encode()) <= 1200
        assert message.endswith(("none is", "use 'simulated'"))  # what the caller can do
    assert len((await cluster.http.get("/v1/" + "x" * 9000)).text) < 2000
    client = ReflectiveClient(cluster.endpoints[0].grpc)
    for more in ({"lora": name}, {"model": name}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call("warmfront.v1.Inference/Generate", {"text": "x", **more})
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert len((caught.value.details() or "").encode()) <= 1200
    await client.channel.close()


async def test_without_any_ready_replica_it_is_503_and_not_404(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()
    await load(cluster, "a", "/a")
    worker.state = common_pb2.DRAINING
    await until(lambda: not cluster.router.fleet.ready)
    assert (await ask(cluster, lora="a")).status_code == 503


async def test_models_lists_adapters_with_their_base(three: Cluster) -> None:
    await load(three, "org/french", "/a", replica="w2")
    listed = (await three.http.get("/v1/models")).json()["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [("simulated", None), ("org/french", "simulated")]
    one = (await three.http.get("/v1/models/org/french")).json()
    assert (one["id"], one["parent"], one["object"]) == ("org/french", "simulated", "model")
    assert (await three.http.get("/v1/models/org")).status_code == 404
    client = ReflectiveClient(three.endpoints[0].grpc)
    ((answer,), _) = await client.call("warmfront.v1.Inference/ListModels", {})
    assert [(one["name"], one.get("loraBase", "")) for one in answer["models"]] == [
        ("simulated", ""),
        ("org/french", "simulated"),
    ]
    await client.channel.close()


async def test_a_name_with_two_contents_is_listed_twice_and_served_by_the_majority(three: Cluster) -> None:
    await load(three, "a", "/v1")
    await three.http.delete("/v1/lora/a?replica=w0")
    await load(three, "a", "/v2", replica="w0")
    listed = (await three.http.get("/v1/lora")).json()["loras"]
    seen = {one["version"]: (one["replicas"], one["served"]) for one in listed}
    assert seen == {version_of("/v1"): (["w1", "w2"], True), version_of("/v2"): (["w0"], False)}
    answers = [await ask(three, lora="a", prompt=f"{n} " * 40) for n in range(30)]
    assert {answer.headers["x-warmfront-replica"] for answer in answers} == {"w1", "w2"}
    await three.http.delete("/v1/lora/a?replica=w1")
    told = await load(three, "a", "/v2", replica="w1")
    assert told["complete"]
    assert (await ask(three, lora="a")).headers["x-warmfront-replica"] in ("w0", "w1")
    replicas = (await three.http.get("/v1/replicas")).json()["replicas"]
    assert [[lora["version"] for lora in one["loras"]] for one in replicas] == [
        [version_of("/v2")],
        [version_of("/v2")],
        [version_of("/v1")],
    ]


async def test_what_became_of_it_is_told_for_each_replica(three: Cluster) -> None:
    told = await load(three, "a", "no/such", status=207)
    assert {one["outcome"] for one in told["replicas"]} == {"refused"}
    assert "no/such cannot be used" in told["replicas"][0]["detail"]
    three.workers["w0"].loras["a"] = "f" * 64
    told = await load(three, "a", "/a", status=207)
    assert [one["outcome"] for one in told["replicas"]] == ["conflict", "loaded", "loaded"]
    assert not told["complete"]
    gone = await three.http.delete("/v1/lora/a?replica=w1")
    assert [one["replica"] for one in gone.json()["replicas"]] == ["w1"]
    gone = await three.http.delete("/v1/lora/a")
    assert [one["outcome"] for one in gone.json()["replicas"]] == ["unloaded", "not_loaded", "unloaded"]
    assert (gone.status_code, gone.json()["complete"]) == (200, True)
    assert (await three.http.delete("/v1/lora/a")).status_code == 404
    assert (await three.http.delete("/v1/lora/a?replica=w9")).status_code == 404
    await load(three, "a", "/a", status=404, replica="w9")


async def test_a_replica_that_is_gone_is_unreachable_and_grpc_tells_the_same(three: Cluster) -> None:
    client = ReflectiveClient(three.endpoints[0].grpc)
    await three.workers["w1"].stop()
    ((answer,), _) = await client.call("warmfront.v1.Admin/LoadLora", {"name": "a", "path": "/a"})
    assert [one["outcome"] for one in answer["replicas"]] == ["loaded", "unreachable", "loaded"]
    assert "complete" not in answer
    ((answer,), _) = await client.call("warmfront.v1.Admin/ListLoras", {})
    assert [(one["name"], set(one["replicas"]) >= {"w0", "w2"}) for one in answer["loras"]] == [("a", True)]
    ((answer,), _) = await client.call("warmfront.v1.Admin/UnloadLora", {"name": "a", "replica": "w0"})
    assert (answer["complete"], answer["replicas"][0]["outcome"]) == (True, "unloaded")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call("warmfront.v1.Admin/LoadLora", {"name": "a"})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await client.channel.close()


async def test_an_order_without_name_or_path_is_400(three: Cluster) -> None:
    bodies: list[Any] = [{}, {"name": "a"}, {"name": "", "path": "/a"}, {"name": "a", "path": "/a", "x": 1}, []]
    for body in bodies:
        assert (await three.http.post("/v1/lora", json=body)).status_code == 400


async def test_names_and_paths_of_any_length_are_400_and_reach_no_worker(three: Cluster) -> None:
    for body in (
        {"name": "a", "path": "/a" * 1_000_000},
        {"name": "a", "path": "ä" * 2049},
        {"name": "n" * 129, "path": "/a"},
    ):
        answer = await three.http.post("/v1/lora", json=body)
        assert (answer.status_code, "is longer than" in answer.text, len(answer.text) < 400) == (400, True, True)
    gone = await three.http.delete(f"/v1/lora/{'n' * 129}")
    assert (gone.status_code, "n" * 129 in gone.text) == (400, False)
    assert not any(worker.loras for worker in three.workers.values())
    assert (await load(three, "n" * 128, "/" + "a" * 4095))["complete"]


async def test_a_fleet_of_nobody_has_nobody_to_load(cluster: Cluster) -> None:
    await cluster.add_router(wait=False)
    assert (await cluster.http.post("/v1/lora", json={"name": "a", "path": "/a"})).status_code == 503


async def test_explain_names_the_replicas_without_the_adapter(three: Cluster) -> None:
    await load(three, "a", "/a", replica="w1")
    for body in ({**BODY, "lora": "a"}, {**BODY, "model": "a"}):
        told = (await three.http.post("/v1/explain", json=body)).json()
        assert told["chosen"] == "w1"
        assert {one["replica"]: one["reason"] for one in told["replicas"]} == {
            "w0": "no_adapter",
            "w1": "chosen",
            "w2": "no_adapter",
        }
        assert "adapter 'a' of version" in told["replicas"][1]["detail"]
    assert (await three.http.post("/v1/explain", json={**BODY, "lora": "b"})).status_code == 404


async def test_a_replica_that_has_just_lost_the_adapter_costs_a_retry(three: Cluster) -> None:
    await load(three, "a", "/a", replica="w0")
    await load(three, "a", "/a", replica="w1")
    three.workers["w0"].faults.lost_loras = {"a"}
    for number in range(60):  # which of two equals is asked first is drawn
        answer = await ask(three, lora="a", prompt=f"{number} " * 40)
        assert (answer.status_code, answer.headers["x-warmfront-replica"]) == (200, "w1")
        if any(request.lora for request in three.workers["w0"].requests):
            break
    else:
        pytest.fail("the one that lost it was never asked")
    three.workers["w1"].faults.lost_loras = {"a"}
    lost = await ask(three, lora="a")
    assert (lost.status_code, "adapter 'a'" in lost.json()["error"]["message"]) == (404, True)
    assert not three.workers["w2"].requests
    assert three.load == 0


async def test_a_stream_goes_on_only_where_the_same_content_is(three: Cluster) -> None:
    await load(three, "a", "/v1")
    whole = texts(await ask(three, lora="a", max_tokens=12))
    await three.http.delete("/v1/lora/a?replica=w2")
    await load(three, "a", "/v2", replica="w2")
    await asyncio.sleep(0)
    for number in range(4):
        before = {name: len(worker.requests) for name, worker in three.workers.items()}
        home = (await ask(three, lora="a")).headers["x-warmfront-replica"]
        assert home in ("w0", "w1")
        three.workers[home].faults.cut_after_tokens = 5
        answer = await ask(three, lora="a", max_tokens=12, cache_salt=f"{number}" if number > 1 else None)
        assert texts(answer) == whole
        three.workers[home].faults.cut_after_tokens = None
        assert len(three.workers["w2"].requests) == before["w2"]


async def test_a_stream_whose_adapter_is_nowhere_else_breaks_off(three: Cluster) -> None:
    await load(three, "a", "/v1", replica="w1")
    three.workers["w1"].faults.cut_after_tokens = 3
    answer = await ask(three, lora="a", max_tokens=12)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert not three.workers["w0"].requests
    assert not three.workers["w2"].requests
    assert three.load == 0


async def test_hot_prefixes_are_kept_by_adapter_and_version(three: Cluster) -> None:
    await load(three, "a", "/a", replica="w1")
    for _ in range(2):
        await ask(three, lora="a")
        await until(three.index_is_true)
    found = three.router.fleet.hot.table.prefixes(0.0, 1e9)
    assert [one.lora for one in found] == [str(Adapter("a", version_of("/a")))]
    assert Adapter.parse(found[0].lora) == ("a", version_of("/a"))


async def test_unknown_names_in_a_burst_cost_few_looks_at_redis(cluster: Cluster) -> None:
    await cluster.add_worker("w0", lease_s=60.0)
    await cluster.add_router(heartbeat_s=20.0, lease_s=60.0)  # which looks by itself every five seconds

    async def num_looks() -> int:
        async with redis.asyncio.from_url(cluster.redis_url) as client:
            return int((await client.info("commandstats"))["cmdstat_mget"]["calls"])

    before, began_s = await num_looks(), time.monotonic()
    answers = await asyncio.gather(*(ask(cluster, lora=f"no-{n}") for n in range(100)))
    assert {answer.status_code for answer in answers} == {404}
    assert await num_looks() - before <= 2 + (time.monotonic() - began_s) / 0.05


def lease(**versions: str) -> common_pb2.ReplicaLease:
    return common_pb2.ReplicaLease(
        loras=[common_pb2.LoadedLora(name=name, version=version, rank=4) for name, version in versions.items()]
    )


def test_of_equally_many_the_same_content_is_served_by_every_router() -> None:
    ready = {"w0": lease(a="1", b="9"), "w1": lease(a="2")}
    for names in (("w0", "w1"), ("w1", "w0")):
        adapters = Adapters({name: ready[name] for name in names})
        assert adapters.named("a") == ("a", "2")
        assert adapters.names == ["a", "b"]
        assert set(adapters.caches(Adapter("a", "1"))) == {"w0"}
        assert not adapters.caches(Adapter("a", "3"))
    assert Adapters({}).named("a") is None


@pytest.mark.parametrize(("name", "may_be"), [("a", True), ("ft:m:org::1", True), ("a/b-c_d.e", True), ("a@b", False)])
def test_names_of_adapters_hold_no_at_sign(name: str, may_be: bool) -> None:
    assert is_adapter_name(name) is may_be
