"""Fields of OpenAI's and vLLM's completions that are not offered here, with the values by which they ask for nothing.

Many clients write every field that they know, at its default. So a field is let through where it says what is done
anyway, and refused by name where it asks for something else. null asks for nothing in all of them.

Sources: OpenAI's reference of chat completions and completions; the two request classes of vLLM 0.32
(vllm/entrypoints/openai/chat_completion/protocol.py and completion/protocol.py), and the ``guided_*`` of those before.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from router.errors import UnsupportedError

NotOffered = Mapping[str, tuple[Any, ...]]  # field: what it may say beside null

_BOTH: NotOffered = {
    # The form of the answer
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    # How tokens are drawn
    "use_beam_search": (False,),
    "length_penalty": (1.0,),  # of a beam search
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    # How text is made of them
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "stream_interval": (1,),
    # What is told beside it
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "return_mm_kwargs": (True,),
    "mm_payload": ("tensors",),
    # What becomes of the prompt
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),  # where it is truncated
    # Beyond one engine
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
}
CHAT: NotOffered = {
    **_BOTH,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),  # {} asks for a search
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),  # where there is any
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "echo": (False,),
    "add_special_tokens": (False,),  # the template writes them
    "return_prompt_text": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
COMPLETION: NotOffered = {
    **_BOTH,
    "echo": (False,),
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}


def without(fields: Mapping[str, Raw], not_offered: NotOffered) -> dict[str, Raw]:
    """The other fields. Raises ``UnsupportedError`` for one that asks for something."""
    kept = {}
    for name, raw in fields.items():
        if name not in not_offered:
            kept[name] = raw
            continue
        value = msgspec.json.decode(raw)
        if value is not None and value not in not_offered[name]:
            raise unsupported(name)
    return kept


def unsupported(name: str) -> UnsupportedError:
    """The refusal of a field."""
    return UnsupportedError(f"{name} is not supported by this version: leave it out", param=name)
