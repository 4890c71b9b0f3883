"""The served model as a router needs it: built from what a worker tells, so that routers read no model files."""

import asyncio
from typing import Any

from warmfront_pb.v1 import inference_pb2, worker_pb2

from common.limits import DEFAULTS
from router.chat import ChatTemplate
from router.errors import TOO_LONG, InvalidRequestError, UnsupportedError
from router.segments import SegmentedEncoder, pack_ids

_INLINE_MESSAGES = 256  # 3 us each: a longer chat is rendered in a thread


class ModelProfile:
    """Turns prompts into token ids. Raises ``UnsupportedError`` for a tokenizer or template it cannot use."""

    def __init__(self, model: worker_pb2.GetModelResponse) -> None:
        self.name = model.served_model_name
        self.contract = model.contract
        self.max_model_len = model.max_model_len
        self.vocab_size = model.vocab_size
        ours: dict[str, Any] = {**DEFAULTS, "top_k": 0, "n": 1}
        self.defaults = inference_pb2.SamplingParams(**ours)
        self.defaults.MergeFrom(model.defaults)
        try:
            self.encoder = SegmentedEncoder(model.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise UnsupportedError(f"the tokenizer of {self.name!r} cannot be read: {error}") from error
        self._max_chars = self.max_model_len * self.encoder.max_token_chars
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = {name: token for name in names if (token := getattr(model, name))}  # templates ask "is defined"
        self._chat = ChatTemplate(model.chat_template, special) if model.chat_template else None
        bos = self.encoder.token_to_id(model.bos_token) if model.adds_bos and model.bos_token else None
        self._front = b"" if bos is None else pack_ids([bos])

    async def text_ids(self, text: str) -> bytes:
        """Ids of a plain prompt, packed as little-endian uint32."""
        return self._front + await self._encode(text, "prompt")

    async def chat_ids(self, chat: inference_pb2.Chat) -> bytes:
        """Ids of a rendered chat, packed. The template writes its own special tokens."""
        if self._chat is None:
            raise InvalidRequestError(
                f"messages: model {self.name!r} has no chat template: send a plain prompt", param="messages"
            )
        if len(chat.messages) <= _INLINE_MESSAGES:
            text = self._chat.render(chat.messages, chat.continue_final_message)
        else:
            text = await asyncio.to_thread(self._chat.render, chat.messages, chat.continue_final_message)
        return await self._encode(text, "messages")

    async def _encode(self, text: str, param: str) -> bytes:
        if len(text) > self._max_chars:  # megabytes would take seconds, in which nobody else is served
            raise InvalidRequestError(
                f"{param} has {len(text)} characters, more than {self.max_model_len} tokens can hold: shorten it",
                param=param,
                code=TOO_LONG,
            )
        return await self.encoder.encode(text)

    def close(self) -> None:
        """End the encoding thread."""
        self.encoder.close()
