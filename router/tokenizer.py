"""Text and chats to token ids, as the served model does it; built from what a worker tells of its model."""

import asyncio
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Tokenizer
from warmfront_pb.v1 import inference_pb2, worker_pb2

from router.chat import ChatTemplate
from router.errors import InvalidRequestError, UnsupportedError

# Below this a thread costs more than the encoding itself (about 1 us per character).
_INLINE_CHARS = 2_000


class ModelProfile:
    """One model as a router needs it. Raises ``UnsupportedError`` for a tokenizer or template it cannot use."""

    def __init__(self, model: worker_pb2.GetModelResponse) -> None:
        self.name = model.served_model_name
        self.contract = model.contract
        self.max_model_len = model.max_model_len
        self.vocab_size = model.vocab_size
        self.defaults = model.defaults
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_str(model.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise UnsupportedError(f"the tokenizer of {self.name!r} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = {name: token for name in names if (token := getattr(model, name))}  # templates ask "is defined"
        self._chat = ChatTemplate(model.chat_template, special) if model.chat_template else None
        bos = self._tokenizer.token_to_id(model.bos_token) if model.adds_bos and model.bos_token else None
        self._front = [] if bos is None else [bos]
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def text_ids(self, text: str) -> bytes:
        """Ids of a plain prompt, packed as little-endian uint32."""
        return pack_ids(self._front + await self._encode(text))

    async def chat_ids(self, chat: inference_pb2.Chat) -> bytes:
        """Ids of a rendered chat, packed. The template writes its own special tokens."""
        if self._chat is None:
            raise InvalidRequestError(
                f"messages: model {self.name!r} has no chat template: send a plain prompt", param="messages"
            )
        return pack_ids(await self._encode(self._chat.render(chat.messages, chat.continue_final_message)))

    def close(self) -> None:
        """End the encoding thread."""
        self._threads.shutdown(wait=False)

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= _INLINE_CHARS:
            return self._encode_now(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode_now, text)

    def _encode_now(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def pack_ids(token_ids: list[int]) -> bytes:
    """Little-endian uint32."""
    packed = array("I", token_ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of ``pack_ids``."""
    packed = array("I", data)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tolist()
