"""A model without a model: a deterministic function of all tokens before, with a KV store that can be got wrong.

Each slot keeps a digest of its own token and of the slot before it, read through the block table, as attention would.
The next token is drawn from the last digest and the seed. So a block that is reused for the wrong prefix, read before
it was written or overwritten too early changes the answer.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence

from cache.events import Tier
from cache.prefix_cache import BlockCopies
from worker.batch import SequenceSlice, SliceResult, StepBatch, TokenLogprobs
from worker.config import WorkerConfig
from worker.main import Loader
from worker.replica import Loaded, ModelCard, Progress
from worker.simulated import UncheckedReader

_MASK = (1 << 64) - 1


def mix(value: int, token: int) -> int:
    value = (value * 0x9E3779B97F4A7C15 + token + 1) & _MASK
    return value ^ (value >> 29)


class FakeRunner:
    """``forbidden_token_ids`` are honoured; ``eos_token_id`` comes up about once in 16 draws."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        eos_token_id: int = 2,
        step_s: float = 0.0,
        poison: Callable[[SequenceSlice], str | None] = lambda _: None,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.step_s = step_s
        self.poison = poison  # a message: this slice fails; one that begins with "raise": the whole step does
        self.slots = [0] * (num_blocks * block_size)
        self.tiers = {Tier.DEVICE: self.slots, Tier.HOST: [0] * ((num_host_blocks + 1) * block_size)}
        self.batches: list[list[tuple[str, int, int]]] = []  # per step: (request id, start, tokens)
        self.adapters: set[str] = set()
        self.dead = False
        self.hangs = threading.Event()  # while it is set, steps do not end

    def add_adapter(self, adapter: str, weights: None) -> None:
        self.adapters.add(adapter)

    def remove_adapter(self, adapter: str) -> None:
        self.adapters.remove(adapter)

    def copy(self, copies: Sequence[BlockCopies]) -> None:
        for some in copies:
            for source, target in zip(some.sources, some.targets, strict=True):
                base, into = source * self.block_size, target * self.block_size
                kept = self.tiers[some.source_tier][base : base + some.num_tokens]
                self.tiers[some.target_tier][into : into + some.num_tokens] = kept

    def execute(self, batch: StepBatch) -> list[SliceResult]:
        if self.dead:
            raise RuntimeError("the device is gone")
        while self.hangs.is_set():
            time.sleep(0.01)
        if self.step_s:
            time.sleep(self.step_s)
        self.batches.append([(one.request_id, one.start, len(one.token_ids)) for one in batch.slices])
        errors = [self.poison(one) for one in batch.slices]
        for error in errors:
            if error is not None and error.startswith("raise"):
                raise RuntimeError(error)
        return [
            self._slice(one) if error is None else SliceResult(error=error)
            for one, error in zip(batch.slices, errors, strict=True)
        ]

    def _slice(self, one: SequenceSlice) -> SliceResult:
        def slot(position: int) -> int:
            return one.block_ids[position // self.block_size] * self.block_size + position % self.block_size

        assert one.lora is None or one.lora in self.adapters, f"{one.lora} is not loaded"
        begin = 1 if one.lora is None else mix(1, zlib.crc32(one.lora.encode()))
        value = self.slots[slot(one.start - 1)] if one.start else begin
        prompt_logprobs = []
        for offset, token in enumerate(one.token_ids):
            value = mix(value, token)
            position = one.start + offset
            self.slots[slot(position)] = value
            if one.num_prompt_logprobs is not None and position + 1 < len(one.prompt_token_ids):
                predicted = one.prompt_token_ids[position + 1]
                prompt_logprobs.append(self._logprob(value, predicted, one.num_prompt_logprobs))
        if one.sampling is None:
            return SliceResult(prompt_logprobs=prompt_logprobs)
        drawn = value
        while True:
            drawn = mix(drawn, one.sampling.seed if one.sampling.temperature else 0)
            token_id = self.eos_token_id if drawn % 16 == 0 else 3 + (drawn >> 8) % (self.vocab_size - 3)
            if token_id not in one.forbidden_token_ids:
                break
        logprobs = None
        if one.sampling.num_logprobs is not None:
            logprobs = self._logprob(value, token_id, one.sampling.num_logprobs)
        return SliceResult(token_id=token_id, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _logprob(self, value: int, token_id: int, count: int) -> TokenLogprobs:
        top = [((value + index) % self.vocab_size, -1.0 - index) for index in range(count)]
        return TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top)


def fake_tokenizer_json(vocab_size: int = 1000) -> str:
    """Token i reads "i.", apart from 0 and 2, which are special."""
    names = {index: f"{index}." for index in range(vocab_size)}
    special = [{"id": index, "content": f"<{index}>", "special": True} for index in (0, 2)]
    return json.dumps(
        {
            "model": {"vocab": {name: index for index, name in names.items()}},
            "decoder": {"type": "ByteLevel"},
            "added_tokens": special,
        }
    )


def fake_loader(
    *, num_blocks: int = 200, max_model_len: int = 500, name: str = "fake", runner: FakeRunner | None = None
) -> Loader:
    """A loader that needs no model; ``runner`` is the one that tests hold on to."""

    def load(config: WorkerConfig, progress: Progress) -> Loaded:
        progress("loading weights", 1.0)
        blocks = (config.kv_blocks or num_blocks) + 1
        return Loaded(
            card=ModelCard(
                name=config.served_model_name or name,
                model_fingerprint=f"model of {name}",
                tokenizer_fingerprint="tokenizer",
                tokenizer_json=fake_tokenizer_json(),
                dtype="float32",
                vocab_size=1000,
                max_model_len=config.max_model_len or max_model_len,
                kv_bytes_per_token=8,
                eos_token_ids=(2,),
            ),
            runner=runner or FakeRunner(blocks, config.block_size),
            num_blocks=blocks,
            max_num_batched_tokens=config.max_num_batched_tokens or 64,
            adapter_reader=UncheckedReader(config.max_lora_rank),
        )

    return load
