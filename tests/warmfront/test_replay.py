"""The simulated fleet: what it must have in common with a real one, and the arithmetic of its clock."""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import sys
import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_hash import HashScheme
from cache.events import Tier
from cache.prefix_cache import PrefixCache
from cache.prefix_index import PrefixIndex
from router.policy import POLICIES
from warmfront.errors import WrongUse
from warmfront.replay.capacity import index_bytes, sub_block_loss
from warmfront.replay.command import replay as replay_command
from warmfront.replay.report import hit_rate_over_time, over_bound_note
from warmfront.replay.settings import Settings
from warmfront.replay.simulation import Simulation, open_loop_speed, oracle_hit_rate, simulate
from warmfront.replay.trace import Job, Turn, name_blocks, read_trace

ROOT = Path(__file__).parents[2]
SCHEME = HashScheme(block_size=8)


def turn(token_ids: list[int], *, session: str = "s", at_s: float = 0.0, output: list[int] | None = None) -> Turn:
    return Turn(
        at_s=at_s,
        session=session,
        num_tokens=len(token_ids),
        num_output_tokens=len(output) if output else 1,
        token_ids=array("i", token_ids),
        output_token_ids=array("i", output) if output else None,
    )


def chats(seed: int, num_sessions: int = 12, num_turns: int = 4) -> list[Turn]:
    """Sessions that share two system prompts and grow by their answers."""
    rng = random.Random(seed)
    systems = [[rng.randrange(1000) for _ in range(60)] for _ in range(2)]
    turns = []
    for session in range(num_sessions):
        prompt = list(rng.choice(systems))
        for number in range(num_turns):
            prompt = prompt + [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
            output = [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
            turns.append(turn(prompt, session=f"s{session}", at_s=rng.random() + number, output=output))
            prompt = prompt + output
    return sorted(turns, key=lambda one: one.at_s)


def mooncake(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# The clock


def test_the_second_prompt_of_a_replica_waits_for_the_first_and_pays_for_what_it_misses() -> None:
    front = list(range(16))
    jobs = name_blocks([turn([*front, 50], session="a"), turn([*front, 60, 61, 62], session="b")], SCHEME)
    fleet = Settings(num_replicas=1, kv_blocks=20, prefill_tokens_per_s=100, in_flight=2, event_delay_s=0)
    outcome = simulate(jobs, SCHEME, fleet)
    assert outcome.ttft_s == pytest.approx([0.17, 0.17 + 0.03])
    assert (outcome.num_hit_tokens, outcome.num_prompt_tokens) == (16, 17 + 19)
    assert outcome.makespan_s == pytest.approx(0.2)


def test_each_step_makes_an_answer_longer_and_computes_what_it_can_of_the_next_prompt() -> None:
    jobs = name_blocks([turn([1] * 10, session="a", output=[2] * 5), turn([3] * 10, session="b")], SCHEME)
    fleet = Settings(num_replicas=1, kv_blocks=20, prefill_tokens_per_s=100, decode_s=1.0, in_flight=2)
    outcome = simulate(jobs, SCHEME, fleet)
    assert outcome.ttft_s == pytest.approx([0.1, 0.1 + 1.0 + 0.1])
    assert outcome.makespan_s == pytest.approx(0.1 + 1.1 + 3.0)


def test_a_prompt_waits_while_the_blocks_for_it_and_its_answer_are_short() -> None:
    jobs = name_blocks([turn([1] * 10, session="a", output=[2] * 6), turn([3] * 10, session="b")], SCHEME)
    fleet = Settings(num_replicas=1, kv_blocks=3, prefill_tokens_per_s=100, decode_s=1.0, in_flight=2)
    assert simulate(jobs, SCHEME, fleet).ttft_s == pytest.approx([0.1, 0.1 + 5.0 + 0.1])


def test_a_turn_is_not_sent_before_the_answer_of_the_turn_before_it() -> None:
    jobs = name_blocks([turn([1] * 10), turn([1] * 20), turn([9] * 5, session="other")], SCHEME)
    fleet = Settings(num_replicas=3, kv_blocks=20, prefill_tokens_per_s=100, in_flight=3, policy="round_robin")
    closed = simulate(jobs, SCHEME, fleet)
    assert closed.first_token_at_s == pytest.approx([0.05, 0.1, 0.3])  # the second turn meets a cold replica
    opened = simulate(jobs, SCHEME, Settings(num_replicas=3, kv_blocks=20, prefill_tokens_per_s=100, speed=1.0))
    assert opened.ttft_s[-1] == pytest.approx(0.12)  # and here the one that holds its first block


def test_what_comes_back_from_host_memory_takes_its_own_time_and_is_a_hit() -> None:
    prompts = ([1] * 41, [2] * 41, [1] * 41)  # five blocks and one token: room for one of them
    jobs = name_blocks([turn(tokens, session=f"{n}", at_s=float(n)) for n, tokens in enumerate(prompts)], SCHEME)
    fleet = Settings(num_replicas=1, kv_blocks=6, prefill_tokens_per_s=100, speed=1.0)
    assert simulate(jobs, SCHEME, fleet).hit_tokens == [0, 0, 0]
    outcome = simulate(jobs, SCHEME, replace(fleet, host_kv_blocks=20, host_tokens_per_s=400))
    assert outcome.hit_tokens == [0, 0, 40]
    assert outcome.ttft_s == pytest.approx([0.41, 0.41, 40 / 400 + 0.01])


def test_an_open_loop_keeps_the_times_of_the_trace() -> None:
    jobs = name_blocks([turn([n] * 10, session=f"{n}", at_s=5.0 + n) for n in range(3)], SCHEME)
    fleet = Settings(num_replicas=1, kv_blocks=20, prefill_tokens_per_s=100, speed=2.0)
    outcome = simulate(jobs, SCHEME, fleet)
    assert outcome.first_token_at_s == pytest.approx([2.6, 3.1, 3.6])
    assert outcome.makespan_s == pytest.approx(1.1)


def test_a_router_hears_of_another_ones_request_a_millisecond_later() -> None:
    def requests_of(gap_s: float) -> list[int]:
        """Of two sessions that have one home, sent through two routers."""
        jobs = name_blocks([turn([n] * 10, session=f"{n}", at_s=at_s) for n, at_s in ((0, 0.0), (3, gap_s))], SCHEME)
        return simulate(jobs, SCHEME, Settings(num_replicas=2, kv_blocks=20, speed=1.0, num_routers=2)).requests_of

    assert requests_of(0.0009) == [0, 2]
    assert requests_of(0.0011) == [1, 1]


def test_a_load_share_of_one_brings_requests_as_fast_as_the_fleet_takes_them() -> None:
    jobs = name_blocks([turn([n] * 10, session=f"{n}", at_s=float(n)) for n in range(101)], SCHEME)
    fleet = Settings(num_replicas=1, kv_blocks=20, prefill_tokens_per_s=100)
    assert open_loop_speed(jobs, SCHEME, fleet, 1.0) == pytest.approx(100 / 10.1)


# What it has in common with a real fleet


@pytest.mark.parametrize("policy", ["warmfront", "longest_prefix", "random", "consistent_hash"])
@pytest.mark.parametrize(("decode_s", "host_kv_blocks"), [(0.0, 0), (0.01, 0), (0.01, 80)])
def test_in_the_end_nothing_is_charged_and_every_index_equals_the_caches(
    policy: str, decode_s: float, host_kv_blocks: int
) -> None:
    jobs = name_blocks(chats(seed=1), SCHEME)
    fleet = Settings(
        num_replicas=3,
        kv_blocks=60,
        host_kv_blocks=host_kv_blocks,
        prefill_tokens_per_s=1000,
        decode_s=decode_s,
        policy=policy,
        num_routers=2,
    )
    simulation = Simulation(jobs, SCHEME, fleet, None, POLICIES)
    outcome = simulation.run()
    assert len(outcome.ttft_s) == sum(outcome.requests_of) == len(jobs)
    assert outcome.num_prompt_tokens == sum(job.turn.num_tokens for job in jobs)
    assert sum(outcome.prefill_of) >= outcome.num_prompt_tokens - outcome.num_hit_tokens  # some is computed again
    assert any(one.cache.num_host_cached_blocks for one in simulation.replicas.values()) == bool(host_kv_blocks)
    for router in simulation.routers:
        assert not router.loads.own_shares()
        assert len(router.peers) == 1, "the other router was heard of"
        for name, replica in simulation.replicas.items():
            replica.cache.check_invariants()
            assert not router.loads.of(name).pending
            held = [router.index.num_blocks(name, tier) for tier in Tier]
            assert held == [replica.cache.num_cached_blocks, replica.cache.num_host_cached_blocks]


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_a_named_chain_finds_what_the_hashed_one_finds(seed: int) -> None:
    turns = chats(seed, num_sessions=5, num_turns=3)
    named, hashed = PrefixCache(40, SCHEME), PrefixCache(40, SCHEME)
    for number, job in enumerate(name_blocks(turns, SCHEME)):
        token_ids, output = job.turn.token_ids, job.turn.output_token_ids
        assert token_ids is not None and output is not None
        for cache, chain in ((named, job.chain(SCHEME)), (hashed, SCHEME.chain(token_ids))):
            assert cache.admit(number, chain) is not None
            assert cache.append(number, output)
            cache.commit(number, len(token_ids) + len(output) - 1)
            cache.free(number)
        assert named.stats == hashed.stats
        assert named.take_events() == hashed.take_events()


def test_the_oracle_keeps_prompt_and_answer_but_not_the_last_token() -> None:
    first = turn(list(range(12)), output=[70, 71, 72, 73, 74])
    follow_up = turn([*range(12), 70, 71, 72, 73, 74, 80])
    assert oracle_hit_rate(name_blocks([first, follow_up], SCHEME), SCHEME, 10) == 16 / (12 + 18)


def test_no_policy_on_equal_caches_does_better_than_one_cache_of_the_summed_size() -> None:
    jobs = name_blocks(chats(seed=3), SCHEME)
    best = oracle_hit_rate(jobs, SCHEME, 3 * 60)
    for policy in ("warmfront", "longest_prefix", "random"):
        outcome = simulate(jobs, SCHEME, Settings(num_replicas=3, kv_blocks=60, policy=policy, in_flight=1))
        assert outcome.hit_rate <= best + 0.01


def test_a_request_that_fits_no_replica_is_refused_by_its_size() -> None:
    with pytest.raises(WrongUse, match="--kv-blocks 2: the trace's longest request takes 3"):
        simulate(name_blocks([turn([1] * 20)], SCHEME), SCHEME, Settings(kv_blocks=2))


def test_requests_that_a_router_would_have_held_back_are_counted_and_told_of() -> None:
    jobs = name_blocks([turn([number] * 100, session=f"s{number}") for number in range(6)], SCHEME)
    fleet = Settings(kv_blocks=100, num_replicas=1, in_flight=6, prefill_tokens_per_s=150.0, max_num_batched_tokens=64)
    outcome = simulate(jobs, SCHEME, fleet)
    assert outcome.num_over_bound == 3, "4 steps' tokens are 256, and 300 wait when the fourth comes"
    assert over_bound_note(outcome).startswith("warmfront, 1 replicas: 3 of 6 requests went to a replica that was full")
    assert not over_bound_note(simulate(jobs, SCHEME, replace(fleet, num_replicas=6)))


def test_equal_seeds_give_equal_runs() -> None:
    jobs = name_blocks(chats(seed=4), SCHEME)
    runs = [simulate(jobs, SCHEME, Settings(kv_blocks=60, policy="random", seed=7)) for _ in range(2)]
    assert runs[0].ttft_s == runs[1].ttft_s


def test_tokens_lost_inside_a_block_are_those_a_cache_of_single_tokens_would_hit() -> None:
    turns = [turn([*range(8), 1, 2, 3]), turn([*range(8), 1, 2, 9, 9])]
    assert sub_block_loss(turns, SCHEME, 20) == 2 / (11 + 12)


def test_the_hit_rate_over_time_adds_up() -> None:
    jobs = name_blocks(chats(seed=5), SCHEME)
    times, rates = hit_rate_over_time(simulate(jobs, SCHEME, Settings(kv_blocks=60)))
    assert times == sorted(times)
    assert len(rates) == 40
    assert rates[0] == 0


# Traces


def test_a_mooncake_prompt_has_one_block_per_id_and_a_partial_last_one(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [0, 5]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [0, 5]},
    )
    turns = read_trace(path)
    partial, full = name_blocks(turns, HashScheme(block_size=512))
    assert (len(partial.keys), len(full.keys)) == (1, 2)
    assert partial.keys == full.keys[:1]
    assert partial.turn.num_output_tokens == 7
    small = name_blocks(turns, HashScheme(block_size=16))
    assert [len(job.keys) for job in small] == [1000 // 16, 64]
    assert small[0].keys == small[1].keys[:62]
    assert len(set(small[1].keys)) == 64
    with pytest.raises(WrongUse, match="--block-size 24"):
        name_blocks(turns, HashScheme(block_size=24))


def test_names_made_of_counted_ids_are_spread_as_hashes_are(tmp_path: Path) -> None:
    """The index takes a key's low bits for its place: 4,096 of them fill 1 - 1/e of as many places."""
    ids = list(range(4096))
    line = {"timestamp": 0, "input_length": 512 * 4096, "output_length": 1, "hash_ids": ids}
    (job,) = name_blocks(read_trace(mooncake(tmp_path / "trace.jsonl", line)), HashScheme(block_size=512))
    assert len({key % 4096 for key in job.keys}) == pytest.approx(4096 * (1 - 1 / math.e), rel=0.05)
    assert 0 not in job.keys and len(set(job.keys)) == 4096


def test_answers_without_ids_take_room_and_leave_blocks_that_nobody_hits() -> None:
    job = Job(
        turn=Turn(at_s=0, session="s", num_tokens=16, num_output_tokens=17, hash_ids=[0]),
        keys=array("Q", [1, 2]),
        all_hashes=[bytes(7) + b"\1", bytes(7) + b"\2"],
        all_keys=array("Q", [1, 2]),
    )
    outcome = simulate([job], SCHEME, Settings(num_replicas=1, kv_blocks=5))
    assert outcome.final_caches[0].num_cached_blocks == 4
    again = simulate(
        [job, replace(job, turn=replace(job.turn, session="t"))], SCHEME, Settings(num_replicas=1, kv_blocks=9)
    )
    assert again.num_hit_tokens == 8
    with pytest.raises(WrongUse):
        simulate([job], SCHEME, Settings(num_replicas=1, kv_blocks=4))


def test_arrivals_on_one_tick_are_spread_until_the_next(tmp_path: Path) -> None:
    line = {"input_length": 10, "output_length": 1, "hash_ids": [1]}
    stamps = [0, 0, 0, 0, 6000, 6000]
    path = mooncake(tmp_path / "trace.jsonl", *({"timestamp": stamp, **line} for stamp in stamps))
    assert [one.at_s for one in read_trace(path)] == [0, 1.5, 3, 4.5, 6, 7.5]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"timestamp_ms": 0, "token_ids": [1]}', "output_tokens is missing; expected"),
        ('{"timestamp_ms": "0", "token_ids": [1], "output_tokens": 1}', "timestamp_ms is no number of milliseconds"),
        ('{"timestamp_ms": NaN, "token_ids": [1], "output_tokens": 1}', "timestamp_ms is no number of milliseconds"),
        ('{"timestamp_ms": 0, "token_ids": [-1], "output_tokens": 1}', "token_ids is no list of whole numbers from 0"),
        ('{"timestamp_ms": 0, "token_ids": ["a"], "output_tokens": 1}', "token_ids is no list"),
        ('{"timestamp_ms": 0, "token_ids": 7, "output_tokens": 1}', "token_ids is no list"),
        ('{"timestamp_ms": 0, "token_ids": [1], "output_tokens": "x"}', "output_tokens is no whole number"),
        ('{"timestamp_ms": 0, "token_ids": [1], "output_tokens": 1000000000000}', "at most 16777216 tokens"),
        ('{"timestamp_ms": 0, "text": 5, "output_tokens": 1}', "text is a string"),
        ('{"timestamp_ms": 0, "messages": [{"role": "user"}], "output_tokens": 1}', "messages are objects"),
        ('{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [-1]}', "hash_ids is no list"),
        ("[1, 2]", "no object; expected"),
        ("hello", "no JSON: expecting value at character 1; expected"),
        ('{"timestamp_ms": 0, "token_ids": [], "output_tokens": 1}', "the prompt is empty"),
        ('{"timestamp_ms": 0, "output_tokens": 1}', "none of token_ids, text, messages and hash_ids is there"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "1 hash_ids for 600 tokens"),
        ("{", "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp_ms": 0, "token_ids": [1], "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(WrongUse, match=f"line 2.*{complaint}|{complaint}"):
        read_trace(path)


# The command


def replay(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warmfront", "replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.fixture(scope="module")
def chat_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "chats.jsonl"
    with path.open("w") as lines:
        for one in chats(seed=8):
            assert one.token_ids is not None and one.output_token_ids is not None
            entry = {
                "timestamp_ms": one.at_s * 1000,
                "session": one.session,
                "token_ids": one.token_ids.tolist(),
                "output_token_ids": one.output_token_ids.tolist(),
                "output_tokens": one.num_output_tokens,
            }
            lines.write(json.dumps(entry) + "\n")
    return path


def test_what_an_index_takes_counts_its_table_which_is_mapped_memory() -> None:
    cache = PrefixCache(4097, SCHEME, replica="w0", generation="0")
    chain = SCHEME.chain(range(4096 * SCHEME.block_size))
    cache.admit("a", chain)
    cache.commit("a", len(chain))
    index = PrefixIndex()
    index.load("w0", cache.snapshot())
    assert index_bytes([cache]) > index.table_bytes > 4096 * 16


def test_json_prints_one_object_per_policy_and_nothing_else(chat_trace: Path) -> None:
    done = replay(chat_trace, "--policy", "warmfront,random", "--replicas", "2", "--kv-blocks", "60%", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = map(json.loads, done.stdout.splitlines())
    assert list(first) == [
        *("policy", "hit_rate", "oracle_hit_rate", "random_hit_rate", "ttft_ms", "imbalance"),
        *("makespan_s", "regret_tokens"),
    ]
    assert (list(first["ttft_ms"]), list(first["imbalance"])) == (["p50", "p95", "p99"], ["requests", "prefill"])
    assert (first["policy"], second["policy"]) == ("warmfront", "random")
    assert first["random_hit_rate"] == second["random_hit_rate"] == second["hit_rate"]
    assert second["hit_rate"] < first["hit_rate"] <= first["oracle_hit_rate"] + 0.02


def test_what_the_flags_say_of_fleet_and_cost_model_is_what_is_run(tmp_path: Path) -> None:
    """Three prompts of five blocks and one token, a second apart, of which the third is the first again."""
    path = tmp_path / "three.jsonl"
    lines = [
        {"timestamp_ms": 1000 * n, "session": f"s{n}", "token_ids": [token] * 41, "output_tokens": 3}
        for n, token in enumerate((1, 2, 1))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(*more: str) -> dict[str, Any]:
        flags = ("--block-size", "8", "--replicas", "1", "--kv-blocks", "6", "--open-loop", "--decode-time", "0ms")
        speed = ("--prefill-tokens-per-s", "100", "--json")
        done = CliRunner().invoke(replay_command, [str(path), *flags, *speed, *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    plain = run()
    assert (plain["ttft_ms"]["p50"], plain["ttft_ms"]["p99"], plain["makespan_s"]) == (410, 410, 2.41)
    assert (plain["hit_rate"], plain["oracle_hit_rate"], plain["random_hit_rate"], plain["regret_tokens"]) == (
        0,
        0,
        0,
        0,
    )
    assert run("--prefill-tokens-per-s", "200")["ttft_ms"]["p50"] == 205
    assert run("--decode-time", "100ms")["makespan_s"] == pytest.approx(2.41 + 2 * 0.1)
    assert run("--speed", "2")["makespan_s"] == pytest.approx(1.41)
    assert run("--load-share", "0.5")["makespan_s"] == pytest.approx(1.23 / 0.5 + 0.41)  # full speed: 2 s in 1.23
    assert run("--limit", "1")["makespan_s"] == 0.41
    host = run("--host-kv-blocks", "20", "--host-tokens-per-s", "400")
    assert host["hit_rate"] == host["oracle_hit_rate"] == host["random_hit_rate"] == round(40 / 123, 5)
    assert host["ttft_ms"]["p50"] == 410
    assert host["makespan_s"] == pytest.approx(2 + 40 / 400 + 0.01)
    two = ("--replicas", "2", "--policy", "round_robin", "--limit", "2")
    assert run(*two)["imbalance"]["requests"] == 1
    assert run(*two, "--routers", "2")["imbalance"]["requests"] == 2, "each goes round by itself"
    three = run("--replicas", "3", "--policy", "round_robin", "--kv-blocks", "20")
    assert (three["regret_tokens"], three["oracle_hit_rate"]) == (40, round(40 / 123, 5))


def test_lists_give_a_row_for_each_setting_with_what_its_blocks_cost(chat_trace: Path) -> None:
    sizes = ("--replicas", "1,2", "--kv-blocks", "40", "--block-size", "8,16")
    done = replay(chat_trace, *sizes, "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    settings = [(row["block_size"], row["replicas"], row["kv_blocks"]) for row in rows]
    assert settings == [(8, 1, 40), (8, 2, 40), (16, 1, 20), (16, 2, 20)]
    assert all(row["index_bytes"] > 0 and row["hash_ms"] > 0 for row in rows)
    assert rows[0]["sub_block_loss"] < rows[2]["sub_block_loss"]
    table = replay(chat_trace, *sizes).stdout.splitlines()
    assert len(table) == 1 + 1 + 4
    assert "sub-block loss" in table[1]


def test_text_and_messages_are_read_by_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    messages = [{"role": "system", "content": "You are terse. " * 20}, {"role": "user", "content": "Hello."}]
    lines = [{"text": "a b c " * 30}, {"messages": messages}, {"messages": messages}]
    path.write_text("".join(json.dumps({"timestamp_ms": 0, "output_tokens": 3, **line}) + "\n" for line in lines))
    done = replay(path, "--replicas", "1", "--kv-blocks", "40", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["hit_rate"] > 0.2


def test_a_share_of_few_blocks_still_holds_the_longest_request(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    lines = [{"timestamp_ms": 0, "token_ids": [1] * length, "output_tokens": 4} for length in (12, 30, 40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = replay(path, "--policy", "all")
    assert (done.returncode, "8 replicas with 3 blocks of 16 tokens each" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "fastest"], "'fastest' is none of warmfront, "),
        (["--kv-blocks", "none"], "write blocks such as 2669, or a share such as 40%"),
        (["--speed", "2"], "--speed and --load-share need --open-loop"),
        (["--open-loop", "--in-flight", "3"], "--in-flight bounds a closed loop"),
        (["--kv-blocks", "3"], "the trace's longest request takes"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(chat_trace: Path, arguments: list[str], complaint: str) -> None:
    done = replay(chat_trace, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_plot_is_drawn_where_matplotlib_is_there(chat_trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = replay(chat_trace, "--kv-blocks", "40", "--plot", tmp_path / "out.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_tenants_load_gives_the_known_oracle_and_the_default_comes_near_it(tmp_path: Path) -> None:
    path = tmp_path / "tenants.jsonl"
    with path.open("w") as lines:
        subprocess.run(
            [sys.executable, ROOT / "bench/traces/tenants.py"], stdout=lines, stderr=subprocess.DEVNULL, check=True
        )
    done = replay(path, "--replicas", "8", "--kv-blocks", "2669", "--in-flight", "32", "--json")
    result = json.loads(done.stdout)
    assert result["oracle_hit_rate"] == pytest.approx(0.901, abs=0.003)
    assert result["random_hit_rate"] == pytest.approx(0.40, abs=0.02)
    assert result["hit_rate"] >= 0.965 * result["oracle_hit_rate"]
    assert result["imbalance"]["prefill"] <= 1.2  # one run, the same every time


def test_the_same_load_over_the_wire_comes_to_nearly_the_same(chat_trace: Path) -> None:
    fleet = ("--replicas", "2", "--kv-blocks", "60%", "--in-flight", "2", "--block-size", "8", "--json")
    virtual = json.loads(replay(chat_trace, *fleet).stdout)
    done = replay(chat_trace, *fleet, "--live", "--routers", "2", "--prefill-tokens-per-s", "4000", "--time-scale", "1")
    assert done.returncode == 0, done.stderr
    live = json.loads(done.stdout)
    assert list(live) == list(virtual)
    assert live["oracle_hit_rate"] == virtual["oracle_hit_rate"]
    assert live["random_hit_rate"] == pytest.approx(virtual["random_hit_rate"], abs=0.1)
    # The oracle evicts too, so luck on a short trace may pass it; nothing passes a cache that keeps everything.
    unbounded = json.loads(replay(chat_trace, *fleet, "--kv-blocks", "200%").stdout)["oracle_hit_rate"]
    assert live["random_hit_rate"] - 0.05 < live["hit_rate"] <= unbounded + 0.01
    assert 0 < live["ttft_ms"]["p50"] <= live["ttft_ms"]["p99"]


@dataclass
class Ran:
    """One run of `replay --live`, and the command lines of what it started."""

    virtual: dict[str, Any]
    live: dict[str, Any]
    command_lines: set[str]


@pytest.fixture(scope="module")
def one_at_a_time(chat_trace: Path) -> Ran:
    fleet = ("--replicas", "2", "--kv-blocks", "200%", "--in-flight", "1", "--block-size", "8", "--json")
    virtual = json.loads(replay(chat_trace, *fleet).stdout)
    command = [sys.executable, "-m", "warmfront", "replay", str(chat_trace), *fleet, "--live"]
    command += ["--prefill-tokens-per-s", "4000", "--time-scale", "1"]
    seen: set[str] = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        while process.poll() is None:
            seen |= command_lines_of_children(process.pid)
            time.sleep(0.1)
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    return Ran(virtual, json.loads(output), seen)


def command_lines_of_children(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found.add(Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "))
    return found


def test_one_request_at_a_time_hits_over_the_wire_what_the_virtual_clock_says(one_at_a_time: Ran) -> None:
    """With room for everything nothing depends on how quick this machine is: who is warm is always known."""
    virtual, live = one_at_a_time.virtual, one_at_a_time.live
    assert virtual["hit_rate"] == pytest.approx(virtual["oracle_hit_rate"], abs=1e-6)
    assert live["hit_rate"] == pytest.approx(virtual["hit_rate"], abs=0.01)


def test_no_command_line_of_a_live_replay_holds_the_password_of_its_redis(one_at_a_time: Ran) -> None:
    lines = one_at_a_time.command_lines
    assert any(" worker " in line for line in lines)
    assert any(" router " in line for line in lines)
    assert not [line for line in lines if "redis://" in line]


def test_live_takes_one_setting_and_blocks_that_a_worker_can_have(chat_trace: Path, tmp_path: Path) -> None:
    assert "--live runs one setting" in replay(chat_trace, "--live", "--replicas", "1,2").stderr
    trace = mooncake(tmp_path / "m.jsonl", {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]})
    done = replay(trace, "--live", "--kv-blocks", "5")
    assert done.returncode == 2
    assert "blocks of up to 256 tokens" in done.stderr
