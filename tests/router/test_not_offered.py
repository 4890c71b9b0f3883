"""What is not offered is let through where it asks for nothing, and refused by its name where it asks for something."""

import json
from typing import Any

import pytest

from router.errors import InvalidRequestError, UnsupportedError
from router.not_offered import CHAT, COMPLETION
from router.openai_api import ChatBody, CompletionBody, chat_request, completion_requests, parse

CHAT_FIELDS: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION_FIELDS: dict[str, Any] = {"prompt": "hi"}
# Each field of vLLM's sampling parameters at its default, as clients that write all of them send it.
VLLM_DEFAULTS: dict[str, Any] = {
    "use_beam_search": False,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "priority": 0,
    "return_tokens_as_token_ids": None,
    "return_token_ids": None,
    "kv_transfer_params": None,
    "vllm_xargs": None,
    "structured_outputs": None,
    "logit_bias": None,
    "stream_options": None,
}


def chat(**more: Any) -> bytes:
    return chat_request(parse(json.dumps({**CHAT_FIELDS, **more}).encode(), ChatBody)).SerializeToString(
        deterministic=True
    )


def completion(**more: Any) -> bytes:
    (request,) = completion_requests(parse(json.dumps({**COMPLETION_FIELDS, **more}).encode(), CompletionBody))
    return request.SerializeToString(deterministic=True)


def test_a_client_that_writes_every_default_of_vllm_is_answered() -> None:
    assert chat(
        **VLLM_DEFAULTS, add_special_tokens=False, include_reasoning=True, echo=False, tool_choice="none"
    ) == chat(min_tokens=0)
    assert completion(**VLLM_DEFAULTS, add_special_tokens=True, echo=False, suffix=None) == completion(min_tokens=0)


def test_each_is_let_through_at_what_asks_for_nothing_and_else_refused_by_name() -> None:
    for ask, table in ((chat, CHAT), (completion, COMPLETION)):
        plain = ask()
        for name, nothing in table.items():
            for value in (None, *nothing):
                assert ask(**{name: value}) == plain, (name, value)
            with pytest.raises(UnsupportedError, match=f"^{name} is not supported") as caught:
                ask(**{name: {"something": "else"}})
            assert caught.value.param == name


def test_what_turns_a_default_off_is_refused() -> None:
    for name, value in (("skip_special_tokens", False), ("web_search_options", {}), ("function_call", {"name": "f"})):
        with pytest.raises(UnsupportedError, match=name):
            chat(**{name: value})
    with pytest.raises(UnsupportedError, match="add_special_tokens"):
        completion(add_special_tokens=False)
    with pytest.raises(UnsupportedError, match="continuous_usage_stats"):
        chat(stream=True, stream_options={"include_usage": None, "continuous_usage_stats": True})


def test_beside_such_a_field_others_are_still_looked_at() -> None:
    with pytest.raises(InvalidRequestError, match="colour is not a field"):
        chat(skip_special_tokens=True, colour="red")
    with pytest.raises(InvalidRequestError, match="temperature: expected"):
        chat(skip_special_tokens=True, temperature="hot")
    assert chat(skip_special_tokens=True, seed=3) == chat(seed=3)


def test_null_leaves_a_field_of_ours_out() -> None:
    nulls = dict.fromkeys(("priority", "return_token_ids", "ignore_eos", "continue_final_message", "stop", "n"))
    assert chat(**nulls) == chat()
