"""An engine without a model: real scheduler, cache, service and reporter, and a runner that only takes its time.

A step takes what a cost model says: so many prompt tokens per second, and a fixed time when any answer grows. Each
token of an answer is a function of all tokens before it and of the seed, so an answer that another replica continues
equals one that was never interrupted. What a block is taken to hold is kept with the block, as a model's KV would be:
a block that is reused for another prefix, or before it was filled, changes the answer. Imports no torch of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import random
import re
import signal
import threading
import time
import zlib
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cache.events import Tier
from cache.prefix_cache import BlockCopies
from worker.batch import PROBE, SequenceSlice, SliceResult, StepBatch, TokenLogprobs
from worker.config import ConfigError, WorkerConfig
from worker.detokenizer import TokenTable
from worker.models.config import PACKAGED_MODEL
from worker.peft import read_config
from worker.replica import Loaded, ModelCard, Progress

if TYPE_CHECKING:
    from worker.loading.tokenizer import TokenizerFiles

logger = logging.getLogger(__name__)

DEFAULT_KV_BLOCKS = 4096
BYTES = Path("bytes")
"""As ``--model``: one token per byte, so that nothing is loaded."""
_STEP_TOKENS = 2048
_MAX_MODEL_LEN = 131_072
_MEAN_ANSWER_TOKENS = 64  # of an answer that nothing else ends
_CATCH_UP_S = 0.005  # a step that begins so soon after the last one begins where that ended
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FAULT = re.compile(r"(?P<what>die|hang):(?P<count>\d+)|error:(?P<error>\d*\.?\d+)|lag:(?P<lag>\d+)ms")
_START, _END = "<|im_start|>", "<|im_end|>"
_loading = threading.Lock()
_BYTE_VOCAB_SIZE = 65_536  # token ids of recorded loads come from larger vocabularies than one of bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong. Counts are of output tokens that this replica has drawn since its start."""

    die_after: int | None = None  # then the process is killed, with all replicas in it
    hang_after: int | None = None  # then steps begin and never end; leases go on
    error_share: float = 0.0  # of the requests fail at their first token
    event_lag_s: float = 0.0  # cache events reach Redis so much later


def parse_faults(text: str | None) -> Faults:
    """``die:N``, ``hang:N``, ``error:SHARE`` and ``lag:MS`` with commas between them. Raises ``ConfigError``."""
    values: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        match = _FAULT.fullmatch(part.strip())
        if match is None or float(match["error"] or 0) > 1:
            raise ConfigError(f"--fault {part!r}: write die:TOKENS, hang:TOKENS, error:SHARE (up to 1) or lag:200ms")
        if match["count"]:
            values[f"{match['what']}_after"] = int(match["count"])
        elif match["error"]:
            values["error_share"] = float(match["error"])
        else:
            values["event_lag_s"] = int(match["lag"]) / 1000
    return Faults(**values)


def load_simulated(config: WorkerConfig, progress: Progress) -> Loaded:
    """What stands in for a loaded model. Raises ``ConfigError`` for settings that do not go together."""
    faults = parse_faults(config.fault)
    num_blocks = config.kv_blocks if config.kv_blocks is not None else DEFAULT_KV_BLOCKS
    room = num_blocks * config.block_size
    max_model_len = config.max_model_len if config.max_model_len is not None else min(room, _MAX_MODEL_LEN)
    if max_model_len > room:
        raise ConfigError(f"--max-model-len {max_model_len} does not fit --kv-blocks {num_blocks}: {room} tokens")
    card = _card(config, max_model_len)
    host_tokens_per_s = config.host_tokens_per_s / config.time_scale
    runner = SimulatedRunner(
        config.block_size,
        words=words_of(TokenTable.from_tokenizer_json(card.tokenizer_json)),
        end_token_id=card.eos_token_ids[0],
        vocab_size=card.vocab_size,
        prefill_tokens_per_s=config.prefill_tokens_per_s / config.time_scale,
        decode_s=config.decode_time_s * config.time_scale,
        host_tokens_per_s=host_tokens_per_s,
        faults=faults,
    )
    return Loaded(
        card=card,
        runner=runner,
        num_blocks=num_blocks + 1,
        max_num_batched_tokens=config.max_num_batched_tokens or max(_STEP_TOKENS, config.max_num_seqs),
        adapter_reader=UncheckedReader(config.max_lora_rank),
        host_tokens_per_s=host_tokens_per_s if config.num_host_blocks else 0.0,
        event_lag_s=faults.event_lag_s,
    )


class UncheckedReader:
    """Stands where ``worker.lora.LoraReader`` does. Its tensors' file may hold anything: only its digest matters."""

    max_bytes = 1 << 30

    def __init__(self, max_rank: int) -> None:
        self._max_rank = max_rank

    def __call__(self, config: bytes, tensors: bytes) -> tuple[None, int]:
        """No weights, and the rank that the configuration names. Raises ``AdapterError``."""
        return None, read_config(config, self._max_rank).max_rank


@dataclass(slots=True)
class _Block:
    """What a model's KV would be: which tokens stand here, and after what."""

    size: int
    before: int = 0  # digest of the sequence up to this block
    end: int = 0  # and up to its last token
    token_ids: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = array("i", bytes(4 * self.size))

    def copy_from(self, other: _Block, num_tokens: int) -> None:
        self.token_ids[:num_tokens] = other.token_ids[:num_tokens]
        self.before = other.before
        self.end = zlib.crc32(other.token_ids[:num_tokens].tobytes(), other.before)


class SimulatedRunner:
    """Stands where ``ModelRunner`` does. One thread owns it.

    ``words`` are the tokens that answers are made of; ``end_token_id`` comes up once in 64 draws.
    """

    def __init__(
        self,
        block_size: int,
        *,
        words: Sequence[int],
        end_token_id: int,
        vocab_size: int,
        prefill_tokens_per_s: float = math.inf,
        decode_s: float = 0.0,
        host_tokens_per_s: float = math.inf,
        faults: Faults | None = None,
    ) -> None:
        self._block_size = block_size
        self._words = words
        self._end_token_id = end_token_id
        self._vocab_size = vocab_size
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._decode_s = decode_s
        self._faults = faults or Faults()
        self._kept = {tier: defaultdict[int, _Block](partial(_Block, block_size)) for tier in Tier}
        self._host_tokens_per_s = host_tokens_per_s
        self._copying_s = 0.0  # the next step takes so much longer
        self._adapters: dict[str, int] = {}  # where the digest of a sequence with this adapter begins
        self._free_at_s = -math.inf
        self._num_drawn = 0
        self._rng = random.Random()  # of faults alone

    def copy(self, copies: Sequence[BlockCopies]) -> None:
        """Blocks take over what others hold. What comes back from host memory makes the next step last longer."""
        for some in copies:
            for source, target in zip(some.sources, some.targets, strict=True):
                self._kept[some.target_tier][target].copy_from(self._kept[some.source_tier][source], some.num_tokens)
            if some.source_tier is Tier.HOST:
                self._copying_s += len(some.sources) * some.num_tokens / self._host_tokens_per_s

    def execute(self, batch: StepBatch) -> list[SliceResult]:
        """One result per slice, when the time of the step has passed. A probe takes next to none."""
        results = [self._compute(one) for one in batch.slices]
        self._pass_time(batch)
        self._misbehave()
        return results

    def add_adapter(self, adapter: str, weights: None) -> None:
        """Answers with this adapter differ from those of the base, and of others."""
        self._adapters[adapter] = zlib.crc32(adapter.encode())

    def remove_adapter(self, adapter: str) -> None:
        """No slice names it any more."""
        del self._adapters[adapter]

    def _compute(self, one: SequenceSlice) -> SliceResult:
        if one is PROBE:
            return SliceResult(token_id=self._end_token_id)
        digest = self._read(one)
        if one.sampling is None:
            return SliceResult(prompt_logprobs=self._prompt_logprobs(one))
        if not one.output_token_ids and self._rng.random() < self._faults.error_share:
            return SliceResult(error="a simulated fault")
        self._num_drawn += 1
        token_id = self._draw(digest, one)
        logprobs = None if one.sampling.num_logprobs is None else self._logprobs(token_id, one.sampling.num_logprobs)
        return SliceResult(token_id=token_id, logprobs=logprobs, prompt_logprobs=self._prompt_logprobs(one))

    def _read(self, one: SequenceSlice) -> int:
        """The digest of the sequence up to the slice's end; what its blocks hold is brought up to date."""
        size, at, kept = self._block_size, one.start, self._kept[Tier.DEVICE]
        begin = 0 if one.lora is None else self._adapters[one.lora]
        digest = kept[one.block_ids[(at - 1) // size]].end if at else begin
        token_ids = array("i", one.token_ids)
        done = 0
        while done < len(token_ids):
            block, offset = kept[one.block_ids[at // size]], at % size
            count = min(size - offset, len(token_ids) - done)
            if not offset:
                block.before = digest
            block.token_ids[offset : offset + count] = token_ids[done : done + count]
            block.end = digest = zlib.crc32(token_ids[done : done + count].tobytes(), digest)
            done += count
            at += count
        return digest

    def _draw(self, digest: int, one: SequenceSlice) -> int:
        assert one.sampling is not None
        seed = one.sampling.seed if one.sampling.temperature else 0
        drawn = digest
        for attempt in range(len(self._words) + 2):
            drawn = zlib.crc32(f"{seed} {attempt}".encode(), drawn)
            is_end = not drawn % _MEAN_ANSWER_TOKENS
            token_id = self._end_token_id if is_end else self._words[(drawn >> 8) % len(self._words)]
            if token_id not in one.forbidden_token_ids:
                break
        return token_id

    def _pass_time(self, batch: StepBatch) -> None:
        num_decoding = sum(len(one.token_ids) == 1 and one.start > 0 for one in batch.slices)
        seconds = (batch.num_tokens - num_decoding) / self._prefill_tokens_per_s + self._copying_s
        self._copying_s = 0.0
        if num_decoding:
            seconds += self._decode_s
        now = time.monotonic()
        if now - self._free_at_s > _CATCH_UP_S:
            self._free_at_s = now
        self._free_at_s += seconds
        if self._free_at_s > now:
            time.sleep(self._free_at_s - now)

    def _misbehave(self) -> None:
        faults = self._faults
        if faults.die_after is not None and self._num_drawn >= faults.die_after:
            logger.critical("a simulated fault: the process dies after %d tokens", self._num_drawn)
            os.kill(os.getpid(), signal.SIGKILL)
        if faults.hang_after is not None and self._num_drawn >= faults.hang_after:
            logger.critical("a simulated fault: the engine hangs after %d tokens", self._num_drawn)
            threading.Event().wait()

    def _prompt_logprobs(self, one: SequenceSlice) -> list[TokenLogprobs]:
        if one.num_prompt_logprobs is None:
            return []
        predicted = one.prompt_token_ids[one.start + 1 : one.start + 1 + len(one.token_ids)]
        return [self._logprobs(token_id, one.num_prompt_logprobs) for token_id in predicted]

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """Every token is as likely as any other."""
        logprob = -math.log(self._vocab_size)
        return TokenLogprobs(
            token_id=token_id, logprob=logprob, rank=1, top=[(word, logprob) for word in self._words[:num_top]]
        )


def words_of(table: TokenTable) -> list[int]:
    """Tokens that make readable text: a space and small letters; single letters where there are no such."""
    plain = {
        index: text
        for index, token in enumerate(table.token_bytes)
        if index not in table.special and token.isascii() and (text := token.decode()).strip().islower()
    }
    words = [index for index, text in plain.items() if text.startswith(" ") and text[1:].isalpha() and len(text) > 2]
    return words or [index for index, text in plain.items() if text.isalpha()]


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and the two that frame a message."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (_START, _END)])
    return tokenizer


def _card(config: WorkerConfig, max_model_len: int) -> ModelCard:
    """The tokenizer of ``--model``, else of the packaged model where that is installed, else one token per byte."""
    name = config.served_model_name or "simulated"
    if config.model == BYTES or (config.model is None and importlib.util.find_spec(PACKAGED_MODEL) is None):
        tokenizer = byte_tokenizer()
        end_token_id = tokenizer.token_to_id(_END)
        assert end_token_id is not None
        return ModelCard(
            name=name,
            model_fingerprint="simulated",
            tokenizer_fingerprint="bytes",
            tokenizer_json=tokenizer.to_str(),
            dtype="none",
            vocab_size=_BYTE_VOCAB_SIZE,
            max_model_len=max_model_len,
            kv_bytes_per_token=0,
            eos_token_ids=(end_token_id,),
            chat_template=_TEMPLATE,
            eos_token=_END,
        )
    with _loading:  # replicas of one process start together
        files = _tokenizer_files(config.model)
    if not files.eos_token_ids:
        raise ConfigError(f"--model {config.model}: it names no token that ends an answer")
    return ModelCard(
        name=name,
        model_fingerprint="simulated",
        tokenizer_fingerprint=files.fingerprint,
        tokenizer_json=files.tokenizer_json,
        dtype="none",
        vocab_size=files.tokenizer().get_vocab_size(),
        max_model_len=max_model_len,
        kv_bytes_per_token=0,
        eos_token_ids=files.eos_token_ids,
        chat_template=files.chat_template or "",
        bos_token=files.bos_token or "",
        eos_token=files.eos_token or "",
        unk_token=files.unk_token or "",
        pad_token=files.pad_token or "",
    )


@cache
def _tokenizer_files(model: Path | None) -> TokenizerFiles:
    from worker.loading import default_model_path
    from worker.loading.tokenizer import load_tokenizer

    return load_tokenizer(model or default_model_path())
