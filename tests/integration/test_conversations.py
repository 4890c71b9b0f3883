"""The promise itself: a turn goes to the replica that holds the turns before it, and is predicted exactly."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from warmfront_pb.v1 import inference_pb2, inference_pb2_grpc

from tests.integration.cluster import LocalCluster
from tests.worker.adapters import random_adapter
from tests.worker.tiny_models import greedy_text
from worker.loading import default_model_path, load_config, load_model
from worker.loading.tokenizer import load_tokenizer
from worker.model_runner import ModelRunner
from worker.peft import TENSORS_FILE

BLOCK = 16
SYSTEM = "You are the guide of a small museum of clocks. Answer in one short sentence."
QUESTIONS = [
    "Who built the clock called {topic}, and for whom was it made?",
    "What happens inside it when it strikes the hour?",
    "How often must somebody wind it?",
    "Thank you. Which clock should I look at next, and why that one?",
]
TOPICS = ["Aurora", "Basilisk", "Cinder", "Dorado", "Ember", "Falcon", "Gimbal", "Harbour", "Iris", "Juniper"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(load_tokenizer(default_model_path()).tokenizer_json)


def chat_token_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """SmolLM2's chat template, written out by hand so that the test does not lean on the code under test."""
    text = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    return list(tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids)


def reusable(previous: list[int], prompt: list[int]) -> int:
    """Tokens of ``prompt`` that a replica holding ``previous`` need not compute: whole blocks, never the last token."""
    common = 0
    while common < min(len(previous), len(prompt)) and previous[common] == prompt[common]:
        common += 1
    return min(common, len(prompt) - 1) // BLOCK * BLOCK


class Turn:
    """One answer, as both fronts give it."""

    def __init__(self, text: str, token_ids: list[int], cached: int, prompt: int, headers: dict[str, str]) -> None:
        self.text, self.token_ids, self.cached, self.prompt = text, token_ids, cached, prompt
        self.replica = headers["x-warmfront-replica"]
        self.predicted = int(headers["x-warmfront-matched-tokens"])


def ask_http(one: LocalCluster, messages: list[dict[str, str]], salt: str, max_tokens: int = 10) -> Turn:
    answer = one.sdk().chat.completions.with_raw_response.create(
        model="",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"cache_salt": salt, "return_token_ids": True},
    )
    body: dict[str, Any] = json.loads(answer.text)
    choice, usage = body["choices"][0], body["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(choice["message"]["content"], choice["token_ids"], cached, usage["prompt_tokens"], dict(answer.headers))


def ask_grpc(one: LocalCluster, messages: list[dict[str, str]], salt: str, max_tokens: int = 10) -> Turn:
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in messages]),
        sampling=inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0),
        cache_salt=salt,
    )
    with grpc.insecure_channel(one.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=240)
        pieces = list(call)
        metadata = {key: str(value) for key, value in call.trailing_metadata()}
    token_ids = np.frombuffer(b"".join(piece.token_ids for piece in pieces), "<u4").tolist()
    usage = pieces[-1].usage
    text = "".join(piece.text for piece in pieces)
    return Turn(text, token_ids, usage.cached_tokens, usage.prompt_tokens, metadata)


@pytest.mark.parametrize(("ask", "topics"), [(ask_http, TOPICS), (ask_grpc, TOPICS[:3])], ids=["http", "grpc"])
def test_conversations_of_four_turns_stay_warm_and_are_predicted_exactly(
    two_replicas: LocalCluster, tokenizer: Tokenizer, ask: Any, topics: list[str]
) -> None:
    salt = uuid.uuid4().hex  # nothing that another test left may be hit
    seen: list[list[int]] = []
    for topic in topics:
        messages = [{"role": "system", "content": SYSTEM}]
        home, previous = "", list[int]()
        for number, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": question.format(topic=topic)})
            prompt = chat_token_ids(tokenizer, messages)
            turn = ask(two_replicas, messages, salt)
            assert turn.prompt == len(prompt)
            assert turn.predicted == turn.cached
            if number == 0:
                home = turn.replica
                assert turn.cached in {0, *(reusable(other, prompt) for other in seen)}
            else:
                assert turn.replica == home
                assert turn.cached == reusable(previous, prompt)
            previous = prompt + turn.token_ids[:-1]
            seen.append(previous)
            messages.append({"role": "assistant", "content": turn.text})


def test_another_salt_shares_nothing_and_the_same_salt_everything(
    two_replicas: LocalCluster, tokenizer: Tokenizer
) -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Tell me about the clock named Kestrel."},
    ]
    whole = (len(chat_token_ids(tokenizer, messages)) - 1) // BLOCK * BLOCK
    mine, yours = uuid.uuid4().hex, uuid.uuid4().hex
    first, second = ask_http(two_replicas, messages, mine), ask_http(two_replicas, messages, mine)
    other = ask_http(two_replicas, messages, yours)
    assert (first.cached, first.predicted) == (0, 0)
    assert (second.cached, second.predicted, second.replica) == (whole, whole, first.replica)
    assert (other.cached, other.predicted) == (0, 0)
    assert first.text == second.text == other.text


def test_http_and_grpc_share_one_cache(two_replicas: LocalCluster) -> None:
    messages = [{"role": "user", "content": "Name three old kinds of clock and say what drives each of them."}]
    salt = uuid.uuid4().hex
    over_http, over_grpc = ask_http(two_replicas, messages, salt), ask_grpc(two_replicas, messages, salt)
    assert over_grpc.replica == over_http.replica
    assert over_grpc.cached == over_grpc.predicted > 0
    assert over_grpc.text == over_http.text


def test_a_stream_says_the_same_as_a_plain_answer(two_replicas: LocalCluster) -> None:
    messages: Any = [{"role": "user", "content": "Write one sentence about sand glasses."}]
    plain = two_replicas.sdk().chat.completions.create(model="", messages=messages, max_tokens=20, temperature=0)
    chunks = list(
        two_replicas.sdk().chat.completions.create(
            model="",
            messages=messages,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == plain.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == plain.choices[0].finish_reason
    usage, plain_usage = chunks[-1].usage, plain.usage
    assert usage is not None
    assert plain_usage is not None
    assert usage.prompt_tokens == plain_usage.prompt_tokens
    assert usage.completion_tokens == plain_usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None


def test_equal_seeds_draw_equal_texts_on_any_replica(two_replicas: LocalCluster) -> None:
    def draw(seed: int, salt: str) -> tuple[str, str]:
        body = {
            "prompt": "The oldest clock of the town",
            "max_tokens": 16,
            "temperature": 0.9,
            "seed": seed,
            "cache_salt": salt,
        }
        answer = httpx.post(f"{two_replicas.http}/v1/completions", json=body, timeout=240).raise_for_status()
        return answer.json()["choices"][0]["text"], answer.headers["x-warmfront-replica"]

    with ThreadPoolExecutor(6) as pool:
        drawn = list(pool.map(lambda number: draw(7, f"salt-{number}"), range(6)))
    assert len({replica for _, replica in drawn}) == 2
    assert len({text for text, _ in drawn}) == 1
    assert draw(8, "salt-0")[0] != drawn[0][0]


def test_an_adapter_answers_through_openai_s_client_as_the_merged_weights_would(
    two_replicas: LocalCluster, tokenizer: Tokenizer
) -> None:
    path = default_model_path()
    folder = two_replicas.ready_file.parent / "adapters" / "french"
    random_adapter(folder, load_config(path), rank=4, seed=3, size=0.08, lora_alpha=16)
    sdk = two_replicas.sdk()
    question = {"role": "user", "content": "Which of the clocks is the oldest one?"}
    messages: Any = [{"role": "system", "content": SYSTEM}, question]

    def ask(model: str) -> tuple[str, int]:
        answer = sdk.chat.completions.create(
            model=model, messages=messages, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.cached_tokens or 0

    base, _ = ask("")
    with pytest.raises(openai.NotFoundError, match="'french' is not served here"):
        ask("french")
    loaded = httpx.post(f"{two_replicas.http}/v1/lora", json={"name": "french", "path": "french"}, timeout=240)
    assert (loaded.status_code, loaded.json()["complete"]) == (200, True), loaded.text
    assert [one.id for one in sdk.models.list()][1:] == ["french"]
    (cold, none), (warm, all_but_the_end) = ask("french"), ask("french")
    prompt = chat_token_ids(tokenizer, messages)
    assert (none, all_but_the_end) == (0, (len(prompt) - 1) // BLOCK * BLOCK)
    assert cold == warm != base

    merged = load_model(path, dtype="float32", device=torch.device("cpu"))
    tensors = load_file(folder / TENSORS_FILE)
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            merged.weights[f"{module}.weight"] += 16 / 4 * tensors[name.replace("lora_A", "lora_B")] @ a
    wanted = greedy_text(ModelRunner(merged, num_blocks=20, block_size=BLOCK), prompt, 12)
    assert tokenizer.decode(wanted) == cold

    gone = httpx.delete(f"{two_replicas.http}/v1/lora/french", timeout=60)
    assert {one["outcome"] for one in gone.json()["replicas"]} == {"unloaded"}
    with pytest.raises(openai.NotFoundError):
        ask("french")
