from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.fakes.http_router import FakeRouter, explanation, replica
from tests.support import free_port
from tests.warmfront.conftest import Cli
from warmfront.client import Answer, Client
from warmfront.compare import COLUMNS, Row, read_prompts, uncached_cluster, verdict
from warmfront.errors import WrongUse
from warmfront.explain import cache_text, decision_table, decisions_table
from warmfront.status import render


def test_generate_prints_the_text_and_nothing_else(cli: Cli, router: FakeRouter, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt"
    prompt.write_text("one two three")
    result = cli("generate", "--url", router.url, "--prompt-file", str(prompt), "--max-tokens", "2")
    assert (result.exit_code, result.out, result.err) == (0, "TWO THREE \n", "")
    assert router.bodies[0]["temperature"] == 0


def test_generate_json_says_what_the_answer_cost(cli: Cli, router: FakeRouter) -> None:
    arguments = ("generate", "--url", router.url, "--prompt-file", "-", "--max-tokens", "2", "--json", "--seed", "7")
    prompt = "a b c d e f"
    cold, warm = (json.loads(cli(*arguments, stdin=prompt).out) for _ in range(2))
    assert (cold["prompt_tokens"], cold["cached_tokens"], warm["cached_tokens"]) == (6, 0, 4)
    assert (warm["text"], warm["replica"], warm["finish_reason"], warm["matched_tokens"]) == ("E F ", "w0", "length", 4)
    assert router.bodies[0]["seed"] == 7


def test_generate_takes_a_prompt_as_it_is_typed(cli: Cli, router: FakeRouter) -> None:
    result = cli("generate", "--url", router.url, "one two")
    assert (result.exit_code, result.out) == (0, "ONE TWO \n")
    assert (router.bodies[0]["prompt"], router.bodies[0]["max_tokens"]) == ("one two", 256)


def test_generate_needs_a_prompt(cli: Cli, router: FakeRouter) -> None:
    for prompts in ((), ("one", "--prompt-file", "-")):
        result = cli("generate", "--url", router.url, *prompts)
        assert (result.exit_code, "give a PROMPT or --prompt-file" in result.err) == (2, True)
    result = cli("generate", "--url", router.url, "--prompt-file", "-", "--max-tokens", "2")
    assert (result.exit_code, result.err) == (2, "warmfront: --prompt-file is empty\n")


def test_an_error_of_the_router_is_one_line_and_its_exit_code_says_whose_fault(cli: Cli, router: FakeRouter) -> None:
    arguments = ("generate", "--url", router.url, "--prompt-file", "-")
    refused = cli(*arguments, "--max-tokens", "1001", stdin="hello")
    assert (refused.exit_code, "400: max_tokens 1001" in refused.err, refused.err.count("\n")) == (2, True, 1)
    router.break_after = 1
    broken = cli(*arguments, "--max-tokens", "3", stdin="one two three")
    assert (broken.exit_code, "broke off: replica w0 is gone" in broken.err) == (1, True)
    router.break_after, router.cut_after = None, 1
    cut = cli(*arguments, "--max-tokens", "3", stdin="one two three")
    assert (cut.exit_code, "broke off: it was not complete" in cut.err) == (1, True)


@pytest.mark.parametrize(
    "command",
    [("status",), ("chat",), ("compare",), ("drain", "w0"), ("generate",), ("explain",), ("reset",)],
)
def test_without_a_cluster_the_error_says_how_to_start_one(cli: Cli, command: tuple[str, ...]) -> None:
    more = ("--prompt-file", "-", "--max-tokens", "1") if command == ("generate",) else ()
    more += ("--model", "/none") if command == ("compare",) else ()
    result = cli(*command, "--url", f"http://127.0.0.1:{free_port()}", *more, stdin="x")
    assert (result.exit_code, "warmfront up" in result.err, result.err.count("\n")) == (2, True, 1), result.err


def test_chat_keeps_the_conversation_and_shows_what_each_answer_cost(cli: Cli, router: FakeRouter) -> None:
    typed = "hello there\nand now\n/new\nagain\n/exit\n"
    result = cli("chat", "--url", router.url, "--system", "be brief", stdin=typed)
    assert result.exit_code == 0
    sizes = [len(body["messages"]) for body in router.bodies]
    assert sizes == [2, 4, 2]  # system + user; + answer + user; after /new as at first
    assert "HELLO THERE" in result.out
    assert "w0 · 0 / 4 prompt tokens cached · TTFT" in result.out
    assert router.bodies[1]["messages"][2]["role"] == "assistant"


def test_an_adapter_is_asked_for_by_its_name(cli: Cli, router: FakeRouter) -> None:
    missing = cli("chat", "--url", router.url, "--lora", "french", stdin="hello\n")
    assert (missing.exit_code, missing.out) == (1, "")
    assert "no adapter 'french' is loaded; none is" in missing.err
    router.adapters = ["french"]
    assert "loaded: french" in cli("chat", "--url", router.url, "--lora", "dutch", stdin="hello\n").err
    assert "fake with french at" in cli("chat", "--url", router.url, "--lora", "french", stdin="hello\n").out
    cli("generate", "--url", router.url, "--lora", "french", "hello")
    cli("generate", "--url", router.url, "hello")
    assert [body.get("lora") for body in router.bodies] == ["french", "french", None]


def test_chat_goes_on_after_a_failed_answer(cli: Cli, router: FakeRouter) -> None:
    router.break_after = 0
    result = cli("chat", "--url", router.url, stdin="hello\nworld\n")
    assert (result.exit_code, result.err.count("broke off")) == (0, 2)
    assert [len(body["messages"]) for body in router.bodies] == [1, 1]


def test_status_json_is_the_router_s_object(cli: Cli, router: FakeRouter) -> None:
    shown = json.loads(cli("status", "--url", router.url, "--json").out)
    assert shown == {"fleet": "default", "replicas": router.replicas, "queue": {}}


def test_status_shows_blocks_hit_rate_and_its_verdict(cli: Cli, router: FakeRouter) -> None:
    shown = cli("status", "--url", router.url).out
    line = next(line for line in shown.splitlines() if line.startswith("w0"))
    assert line.split() == ["w0", "READY", "12", "/", "900", "/", "4,096", "22.5", "91%", "88%", "0", "1"]
    assert "w1: prompts differ" in shown


def test_status_that_watches_writes_into_a_pipe_as_it_goes(router: FakeRouter) -> None:
    command = [sys.executable, "-m", "warmfront", "status", "--url", router.url, "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        heads = 0
        while heads < 2:
            heads += "replica" in (line := process.stdout.readline())
            assert line
        process.kill()


def test_status_shows_no_hit_rate_before_a_request_counts_for_it(cli: Cli, router: FakeRouter) -> None:
    router.replicas[0] |= {"hit_rate_1m": 0.96, "hit_rate": 0.0, "hit_rate_verdict": ""}
    router.replicas[1] |= {"hit_rate_1m": 0.0, "hit_rate": 0.0, "hit_rate_verdict": "prompts do not match"}
    first, second = (line.split() for line in cli("status", "--url", router.url).out.splitlines() if "READY" in line)
    assert (first[-4:-2], second[-4:-2]) == (["96%", "-"], ["0%", "0%"])


def test_status_shows_blocks_in_host_memory_where_there_are_any(cli: Cli, router: FakeRouter) -> None:
    assert "host" not in cli("status", "--url", router.url).out
    router.replicas[0] |= {"host_kv_blocks": 8192, "host_kv_blocks_cached": 5000}
    assert "12 / 900 / 4,096 + 5,000 / 8,192 host" in cli("status", "--url", router.url).out


def test_status_tells_of_restarts_and_of_hits_in_host_memory(cli: Cli, router: FakeRouter) -> None:
    quiet = cli("status", "--url", router.url).out
    assert "come back" not in quiet and "host memory" not in quiet
    router.replicas[0] |= {"restarts": 2, "host_hit_rate_1h": 0.25}
    shown = cli("status", "--url", router.url).out
    assert "w0: has ended and come back 2 times since this router runs" in shown
    assert "w0: 25% of the last hour's prompt tokens came back from host memory" in shown


def test_status_shows_the_queue_while_there_is_one(cli: Cli, router: FakeRouter) -> None:
    router.queue = {"requests": 0, "tokens": 0, "oldest_s": 0, "tenants": 0, "tokens_per_s": 0, "full_replicas": 0}
    assert "queue" not in cli("status", "--url", router.url).out
    router.queue |= {"requests": 3, "tokens": 4200, "oldest_s": 1.5, "tenants": 2, "tokens_per_s": 900.4}
    shown = " ".join(cli("status", "--url", router.url).out.split())
    assert "3 requests of 2 tenants with 4,200 tokens, the oldest for 1.5 s, drained at 900 tok/s" in shown


def test_drain_waits_until_the_replica_is_gone(cli: Cli, router: FakeRouter) -> None:
    result = cli("drain", "w0", "--url", router.url)
    assert (result.exit_code, router.drained) == (0, ["w0"])
    assert result.out == "w0: draining, 1 request running\nw0: drained\n"


def test_drain_prints_the_router_s_object_where_it_is_asked_to(cli: Cli, router: FakeRouter) -> None:
    result = cli("drain", "w0", "--url", router.url, "--json")
    assert (result.exit_code, json.loads(result.out)) == (0, {"replica": "w0", "running": 1})


def test_drain_of_the_last_replica_that_is_ready_says_what_that_means(cli: Cli, router: FakeRouter) -> None:
    router.replicas = [replica("w0"), replica("w1", "WARMING"), replica("w2", fault="differs")]
    assert "w0 is the last one that is READY" in cli("drain", "w0", "--url", router.url).err
    router.replicas = [replica("w0"), replica("w1")]
    assert cli("drain", "w0", "--url", router.url).err == ""


def test_drain_that_takes_too_long_ends_with_3(cli: Cli, router: FakeRouter) -> None:
    router.drains = False
    result = cli("drain", "w1", "--url", router.url, "--deadline", "10ms")
    assert (result.exit_code, "still has 1 request, after" in result.err) == (3, True)
    assert cli("drain", "w1", "--url", router.url, "--no-wait").exit_code == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\nmore of one\n\ntwo\n", ["one\nmore of one", "two"]),
        ('"one"\n{"prompt": "two"}\n', ["one", "two"]),
    ],
)
def test_compare_reads_lines_blocks_and_json_lines(tmp_path: Path, text: str, expected: list[str]) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    assert [body["prompt"] for body in read_prompts(file)] == expected


def test_compare_names_the_line_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    for text, words in (('"one"\n{"promt": 1}\n', "line 2"), ("  \n", "no prompt")):
        file.write_text(text)
        with pytest.raises(WrongUse, match=words):
            read_prompts(file)


def test_compare_has_a_sample_of_its_own() -> None:
    bodies = read_prompts(None)
    assert len(bodies) == 4
    assert len({body["messages"][0]["content"] for body in bodies}) == 1  # one document
    assert len({body["messages"][1]["content"] for body in bodies}) == 4  # four questions


def test_the_verdict_of_compare_adds_up() -> None:
    def answer(cached: int, ttft_s: float, text: str = "same") -> Answer:
        return Answer(prompt_tokens=100, cached_tokens=cached, ttft_s=ttft_s, text=text)

    equal = Row("p", dict(zip(COLUMNS, (answer(0, 1.0), answer(96, 0.1), answer(0, 1.1)), strict=True)))
    differs = Row("q", dict(zip(COLUMNS, (answer(0, 1.0), answer(96, 0.1), answer(0, 1.1, "other")), strict=True)))
    assert verdict([equal]).startswith(
        "Warm computed 4 of 100 prompt tokens (4.0%) and took 0.10 of the cold TTFT; 1 of 1"
    )
    assert "1 of 2 texts are equal" in verdict([equal, differs])
    assert "deterministic" in verdict([equal, differs])


def test_compare_needs_to_know_the_model_of_a_cluster_that_runs_elsewhere(cli: Cli, router: FakeRouter) -> None:
    result = cli("compare", "--url", router.url)
    assert (result.exit_code, "--model" in result.err) == (2, True)


def test_the_cluster_that_compare_starts_takes_no_port_of_the_first_one(temp_root: Path) -> None:
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        first.listen()
        settings = {
            "engine": "simulated",
            "model": "bytes",
            "kv_blocks": 100,
            "metrics_port": first.getsockname()[1],
            "listen": "::1",
        }
        with uncached_cluster(settings) as client:
            assert client.is_ready()
            assert "127.0.0.1" in client.url


def test_an_address_that_is_none_is_refused() -> None:
    for url in ("ftp://x", "http://", "http://h:99999", "h:abc", "http://[::1"):
        with pytest.raises(WrongUse, match="no HTTP address"):
            Client(url)
    assert Client("127.0.0.1:8000").url == "http://127.0.0.1:8000"


def test_explain_shows_one_decision_and_who_was_refused_why(cli: Cli, router: FakeRouter) -> None:
    result = cli("explain", "--url", router.url, "a prompt")
    assert result.exit_code == 0, result.err
    assert "1,000 tokens, 62 blocks of 16, to w0 by warmfront: none that could be chosen holds more" in result.out
    assert "w1: dtype is 'a', the fleet has 'b'" in result.out
    assert router.bodies[-1] == {"messages": [{"role": "user", "content": "a prompt"}]}
    assert cli("explain", "--url", router.url, "--completion", "a prompt").exit_code == 0
    assert router.bodies[-1] == {"prompt": "a prompt"}
    assert cli("explain", "--url", router.url, "--request-id", "r7").out.startswith("r7: 1,000 tokens")


def test_explain_does_not_deny_what_a_replica_reuses_inside_a_block() -> None:
    short = {"reason": "below_block", "prompt_tokens": 16, "full_blocks": 1, "cached_tokens": 15}
    out = io.StringIO()
    Console(file=out, width=300).print(decision_table(explanation("r7") | short))
    assert "r7: 16 tokens, 1 block of 16, to w0" in out.getvalue()
    assert "the prompt is no longer than a block, and a router knows only of whole ones" in out.getvalue()
    assert "with 15 tokens from its cache, some of them inside a block" in out.getvalue()


def test_explain_says_what_became_of_the_missing_block() -> None:
    cache = {"reason": "evicted", "cached_tokens": 32, "coming_tokens": 0, "evicted_ago_s": 12.5, "idle_s": 300.0}
    cache |= {"removal_reason": "evicted", "evicted_for": "r77"}
    assert cache_text(cache) == (
        "32 tokens held in whole blocks; the next block was evicted 12.5 s ago "
        "to make room for request r77, after 300.0 s without use"
    )
    assert cache_text({**cache, "reason": "hit", "coming_tokens": 16}) == (
        "32 tokens held in whole blocks, 16 more being computed, all of those that can be reused"
    )


def test_explain_lists_the_last_decisions_and_prints_json(cli: Cli, router: FakeRouter) -> None:
    result = cli("explain", "--url", router.url, "--last", "3")
    assert (result.exit_code, "992" in result.out, "warmest" in result.out) == (0, True, True)
    assert router.bodies[-1] == {"last": 3}
    told = json.loads(cli("explain", "--url", router.url, "--json").out)
    assert (told["explanations"][0]["chosen"], router.bodies[-1]) == ("w0", {"last": 20})
    both = cli("explain", "--url", router.url, "--last", "3", "a prompt")
    assert (both.exit_code, "not two of them" in both.err) == (2, True)


@pytest.mark.parametrize(("is_terminal", "width"), [(True, 60), (True, 200), (False, 60)])
def test_an_id_is_never_cut(is_terminal: bool, width: int) -> None:
    request_id = "0123456789abcdef" * 3
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=width, soft_wrap=True, color_system=None)
    console.print(decisions_table([explanation(request_id)]))
    console.print(render({"fleet": "f", "replicas": [replica(f"worker-{request_id}")]}, "http://127.0.0.1:8000"))
    shown = out.getvalue()
    assert f"worker-{request_id}" in shown
    assert shown.count(request_id) == 2
    assert ("…" in shown, "warmest" in shown, "12 / 900 / 4,096" in shown) == (False, True, True)
    if is_terminal:
        assert max(map(len, shown.splitlines())) <= width
    else:
        assert [line for line in shown.splitlines() if line != line.rstrip()] == []


def test_reset_says_who_did_and_fails_when_somebody_did_not(cli: Cli, router: FakeRouter) -> None:
    done = cli("reset", "--url", router.url)
    assert (done.exit_code, done.out) == (0, "w0: reset, 1,200 blocks dropped\n")
    router.has_busy_replica = True
    partly = cli("reset", "--url", router.url)
    assert (partly.exit_code, "w1: busy, requests hold blocks" in partly.out) == (1, True)
    assert "not reset: w1" in partly.err
    assert json.loads(cli("reset", "--url", router.url, "--json").out)["complete"] is False
