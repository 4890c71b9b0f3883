"""One engine step on torch: a batch of slices in, one result per slice out.

The runner owns weights, KV store and attention backend. It lays the slices of a step flat (ids, positions, slots, one
after the other), so that prefill chunks and decode rows share every matrix product; only attention looks at sequences.

In mode ``deterministic`` the number of rows is a multiple of 4 in every product and the attention backend pads keys:
then a token's scores do not depend on what else is computed, nor on how its prompt was cut. ``fast`` takes the quickest
kernels and promises equal text only up to rounding.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cache.prefix_cache import BlockCopies
from worker.attention import Span, make_backend
from worker.attention.sdpa import ROW_MULTIPLE
from worker.batch import GREEDY, SamplingParams, SequenceSlice, SliceResult, StepBatch, TokenLogprobs
from worker.decode_graphs import DecodeGraphs, Recorder
from worker.kv_store import SCRATCH_BLOCK, KVStore, kv_format
from worker.loading import LoadedModel
from worker.lora import LoraReader, LoraSet, LoraWeights
from worker.models.config import ModelConfig
from worker.models.decoder import Decoder
from worker.models.ops import make_ops
from worker.sampler import sample, token_logprobs

logger = logging.getLogger(__name__)

Mode = Literal["fast", "deterministic"]
MODES = ("fast", "deterministic")
_LOGPROB_ROWS = 256  # prompt logprobs take vocabulary-wide rows: so many at once


P = ParamSpec("P")
R = TypeVar("R")


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _on_its_device(method: Callable[P, R]) -> Callable[P, R]:
    """Run a runner's method without gradients, and on its device whichever thread calls.

    Triton launches, and graphs are recorded, on CUDA's current device, which each thread has of its own.
    """

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        runner: Any = args[0]
        with torch.inference_mode(), _current(runner.device):
            return method(*args, **kwargs)

    return run


class SelfTestError(ValueError):
    """The model does not work here: it computes no numbers, or, in deterministic mode, equal input gave other bits."""


class ModelRunner:
    """Runs steps. Not thread-safe: the engine's one thread owns it."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        mode: Mode = "fast",
        attention: str = "auto",
        kv_cache_dtype: str = "auto",
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        cpu_kernel: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        """Takes over ``loaded.weights`` and allocates the KV store.

        ``num_blocks`` counts the scratch block; ``cpu_kernel`` False keeps to torch's operators. Raises ``ValueError``
        for an unknown mode, attention backend or KV cache dtype, or one that cannot be had here, and torch's
        ``OutOfMemoryError`` when the store does not fit.
        """
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; there are: {', '.join(MODES)}")
        self.mode = mode
        self.config: ModelConfig = loaded.config
        self.device = loaded.device
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self._deterministic = mode == "deterministic"
        if self._deterministic and self.device.type != "cpu":
            raise ValueError(
                "mode deterministic is promised on the CPU only: CUDA's matrix products vary with the batch"
            )
        kept = kv_format(kv_cache_dtype, loaded.dtype)
        self._attention = make_backend(
            attention,
            deterministic=self._deterministic,
            block_size=block_size,
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=loaded.dtype,
            device=self.device,
            plain_kv=kept.name == "bfloat16",
            cpu_kernel=cpu_kernel,
        )
        self._ops = make_ops(
            self.config,
            exact=self._deterministic,
            dtype=loaded.dtype,
            device=self.device,
            cpu_kernel=cpu_kernel,
        )
        self._model = Decoder(self.config, loaded.weights, self._ops)
        self._kept = kept
        with _current(self.device):
            self.kv = self._make_store(num_blocks, num_host_blocks)
        self._graphs: DecodeGraphs | None = None
        self._loras = LoraSet(deterministic=self._deterministic, dtype=loaded.dtype, device=self.device)

    @property
    def attention(self) -> str:
        """Name of the attention backend in use."""
        return self._attention.name

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one token takes in all layers."""
        return self.kv.bytes_per_token

    def lora_reader(self, max_rank: int) -> LoraReader:
        """What makes weights for this model of an adapter's files, in any thread."""
        return LoraReader(self.config, self._ops, dtype=self._model.dtype, device=self.device, max_rank=max_rank)

    def add_adapter(self, adapter: str, weights: LoraWeights) -> None:
        """Slices may name this adapter from now on. Raises ``AdapterError`` where mode deterministic would not hold."""
        self._loras.add(adapter, weights)

    def remove_adapter(self, adapter: str) -> None:
        """No slice names it any more."""
        self._loras.remove(adapter)

    @_on_its_device
    def resize(self, num_blocks: int, num_host_blocks: int) -> None:
        """Take a KV store of another size; what stood in the old one is gone. Before the first request."""
        self._graphs = None
        del self.kv  # before the new one: both might not fit
        self.kv = self._make_store(num_blocks, num_host_blocks)

    @_on_its_device
    def record_decode_graphs(self) -> None:
        """Record decode steps where that helps, on CUDA with the paged kernel. After the last ``resize``.

        What cannot be recorded, or answers otherwise than the same step unrecorded, is left aside with a warning.
        """
        if self.device.type != "cuda" or self._attention.name != "triton":
            return
        try:
            self._graphs = self.make_decode_graphs()
            probe = [_slice("probe", [0], 0, [SCRATCH_BLOCK])]
            recorded, plain = self._recorded_logits(probe), self._logits(self._hidden(probe), [0])
            if recorded is None or not torch.allclose(recorded, plain, atol=0.05 * float(plain.abs().max())):
                raise RuntimeError("recorded decode steps answer otherwise than unrecorded ones")
        except RuntimeError as error:
            logger.warning("decode steps run unrecorded, slower in small batches: %s", error)
            self._graphs = None

    def make_decode_graphs(self, record: Recorder | None = None) -> DecodeGraphs:
        """Recordings of this model's decode steps; ``record`` stands in for CUDA's in tests."""

        def forward(ids: Tensor, positions: Tensor, slots: Tensor, plan: Any) -> Tensor:
            return self._model.logits(self._model.forward(ids, positions, slots, self.kv, self._attention, plan))

        attention: Any = self._attention
        max_blocks = -(-self.config.max_context // self.block_size)
        return DecodeGraphs(
            forward,
            attention,
            max_rows=self.max_num_seqs,
            max_blocks=max_blocks,
            device=self.device,
            record=record,
        )

    @_on_its_device
    def peak_bytes(self) -> int:
        """What the largest steps take beside weights and KV on a CUDA device, contexts and libraries included.

        Runs them on whatever store there is, two blocks are enough: every table names one block only. What other
        processes hold on the device counts too. Overwrites the store.
        """
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_allocated(self.device)
        tokens, sampling = self.max_num_batched_tokens, SamplingParams(temperature=1.0, top_p=0.9)
        count = min(self.max_num_seqs, tokens)
        for lengths in (
            [min(tokens, self.config.max_context)],
            [min(tokens // count, self.config.max_context)] * count,
        ):
            blocks = -(-lengths[0] // self.block_size)
            slices = [
                replace(_slice("probe", [0] * length, 0, [SCRATCH_BLOCK] * blocks), sampling=sampling)
                for length in lengths
            ]
            self._step(slices)
        self.record_decode_graphs()
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        self._graphs = None
        torch.cuda.empty_cache()
        return total - free - kept

    @_on_its_device
    def host_tokens_per_s(self) -> float:
        """How many tokens' KV come back from host memory per second; 0 without such. Before the first request."""
        return self.kv.host.blocks_per_s() * self.block_size if self.kv.host is not None else 0.0

    @_on_its_device
    def copy(self, copies: Sequence[BlockCopies]) -> None:
        """Copy KV between blocks, one after the other, before anything else is computed."""
        self.kv.copy(copies)

    @_on_its_device
    def execute(self, batch: StepBatch) -> list[SliceResult]:
        """Compute all slices; their KV is in place afterwards. One result per slice, in order.

        A slice that does not come out as finite numbers gets a result with ``error``. What a kernel refuses is raised:
        the engine finds out whose fault it was, as writing the same KV twice changes nothing. Either way what was
        written is erased, so that no block ever holds anything but numbers, whoever gets it next.
        """
        if not batch.slices:
            return []
        try:
            return self._step(batch.slices)
        except Exception:
            self._erase(batch.slices)
            raise

    @_on_its_device
    def self_test(self) -> None:
        """Read a prompt and decode a token: what is compiled at first use is compiled then, and the scores are finite.

        In deterministic mode also one prompt cold, in chunks, beside others and on warm blocks, compared bit for bit.
        Overwrites the KV store, so it belongs before the first request. Raises ``SelfTestError``.
        """
        room = min((self.kv.num_blocks - 1) * self.block_size, self.max_num_batched_tokens, self.config.max_context)
        ids, table = _test_ids(min(room, 80), self.config.vocab_size), range(1, self.kv.num_blocks)
        for start, stop in ((0, len(ids) - 1), (len(ids) - 1, len(ids))):
            if start < stop:
                (result,) = self._step([replace(_slice("probe", ids[start:stop], start, table), sampling=GREEDY)])
                if result.error is not None:
                    dtype = str(self._model.dtype).removeprefix("torch.")
                    raise SelfTestError(
                        f"this model computes no finite numbers in {dtype}: its files may be damaged, or another "
                        f"--dtype is needed"
                    )
        if self._deterministic:
            self._test_identity()

    def _test_identity(self) -> None:
        room = (self.kv.num_blocks - 2) * self.block_size  # one block is scratch, one holds the neighbour
        length = min(540, room, self.config.max_context)  # past the 512 keys at which the CPU kernel splits
        if length < 8:
            raise SelfTestError(f"{self.kv.num_blocks} KV blocks are too few for the self-test")
        ids = _test_ids(length, self.config.vocab_size)
        table = range(1, self.kv.num_blocks - 1)
        neighbour = _slice("neighbour", ids[:5], 0, [self.kv.num_blocks - 1])
        cuts = [0, length // 3 + 1, length - 7, length - 1, length]
        parts = [_slice("probe", ids[start:stop], start, table) for start, stop in pairwise(cuts)]
        cold = self._hidden([_slice("probe", ids, 0, table)])
        chunked = torch.cat([self._hidden([part]) for part in parts])
        mixed = torch.cat([self._hidden([neighbour, part])[5:] for part in parts])
        warm = self._hidden([_slice("probe", ids[-7:], length - 7, table)])
        last = range(length - 7, length)
        for name, seen, wanted in (
            ("in chunks", chunked, cold),
            ("beside another prompt", mixed, cold),
            ("on warm blocks", warm, cold[-7:]),
            ("alone in the head", self._logits(cold, last[-1:]), self._logits(cold, last)[-1:]),
        ):
            if not torch.equal(seen, wanted):
                rows = int((seen != wanted).any(dim=-1).sum())
                raise SelfTestError(
                    f"mode deterministic does not hold here: {rows} of {len(wanted)} rows computed {name} differ from "
                    f"the cold run (torch {torch.__version__}, {torch.get_num_threads()} threads); use --mode fast"
                )

    @_on_its_device
    def all_logits(self, batch: StepBatch) -> Tensor:
        """Scores at every position of the step, float32 ``[tokens, vocab]``; nothing is drawn. For checks."""
        hidden = self._hidden(batch.slices)
        return self._logits(hidden, range(len(hidden)))

    def _make_store(self, num_blocks: int, num_host_blocks: int) -> KVStore:
        return KVStore(
            num_layers=self.config.num_layers,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self._model.dtype,
            device=self.device,
            kept=self._kept,
            num_host_blocks=num_host_blocks,
        )

    def _recorded_logits(self, slices: Sequence[SequenceSlice]) -> Tensor | None:
        """Scores of a step in which all rows decode, one per slice, where such a step is recorded; else None."""
        if self._graphs is None or any(one.lora is not None or one.sampling is None for one in slices):
            return None
        if any(len(one.token_ids) != 1 or one.num_prompt_logprobs is not None for one in slices):
            return None
        return self._graphs.run(*_lay_flat(slices, self.block_size))

    def _step(self, slices: Sequence[SequenceSlice]) -> list[SliceResult]:
        last_rows: list[int] = (np.cumsum([len(one.token_ids) for one in slices]) - 1).tolist()
        drawing = [index for index, one in enumerate(slices) if one.sampling is not None]
        reading = [index for index, one in enumerate(slices) if one.sampling is None]
        logits, hidden, judged = self._recorded_logits(slices), None, []
        if logits is None:
            hidden = self._hidden(slices)
            if drawing:
                logits = self._logits(hidden, [last_rows[index] for index in drawing])
        if logits is not None:
            judged.append(logits.sum(dim=-1))
        if hidden is not None and reading:  # what breaks one row of a prompt breaks all after it, so the last will do
            judged.append(hidden[[last_rows[index] for index in reading]].sum(dim=-1, dtype=torch.float32))
        finite: list[bool] = torch.isfinite(torch.cat(judged)).tolist()
        results = [SliceResult() for _ in slices]
        if broken := [index for index, sound in zip([*drawing, *reading], finite, strict=True) if not sound]:
            self._erase([slices[index] for index in broken])
            for index in broken:
                results[index] = SliceResult(error="the model computes no finite numbers for this request")
        if logits is not None:
            sound_rows = [row for row, sound in enumerate(finite[: len(drawing)]) if sound]
            kept = logits if len(sound_rows) == len(drawing) else logits[sound_rows]
            drew = [drawing[row] for row in sound_rows]
            for index, draw in zip(drew, sample(kept, [slices[index] for index in drew]), strict=True):
                results[index] = SliceResult(token_id=draw.token_id, logprobs=draw.logprobs)
        for index, one in enumerate(slices):
            if hidden is not None and one.num_prompt_logprobs is not None and results[index].error is None:
                first_row = last_rows[index] + 1 - len(one.token_ids)
                results[index] = replace(results[index], prompt_logprobs=self._prompt_logprobs(hidden, first_row, one))
        return results

    def _hidden(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """Hidden states of all tokens of the step, ``[tokens, hidden]``, before the final norm."""
        token_ids, positions, slots, spans = _lay_flat(slices, self.block_size)
        num_tokens = len(token_ids)
        padding = -num_tokens % ROW_MULTIPLE if self._deterministic else 0
        flat = np.zeros((3, num_tokens + padding), dtype=np.int64)  # padding rows: token 0 at position 0 of scratch
        flat[:, :num_tokens] = token_ids, positions, slots
        ids, at, into = torch.from_numpy(flat).to(self.device, non_blocking=True)
        plan = self._attention.plan(spans, num_tokens + padding)
        lora = self._loras.rows_of(slices)
        return self._model.forward(ids, at, into, self.kv, self._attention, plan, lora)[:num_tokens]

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        picked = hidden.index_select(0, torch.tensor(rows, device=self.device))
        padding = -len(rows) % ROW_MULTIPLE if self._deterministic else 0
        if padding:
            picked = functional.pad(picked, (0, 0, 0, padding))
        return self._model.logits(picked)[: len(rows)]

    def _prompt_logprobs(self, hidden: Tensor, first_row: int, one: SequenceSlice) -> list[TokenLogprobs]:
        """Of each prompt token that a row of this slice predicts: rows before the prompt's last one."""
        assert one.num_prompt_logprobs is not None
        predicted = list(one.prompt_token_ids[one.start + 1 : one.start + len(one.token_ids) + 1])
        found: list[TokenLogprobs] = []
        for offset in range(0, len(predicted), _LOGPROB_ROWS):
            token_ids = predicted[offset : offset + _LOGPROB_ROWS]
            rows = range(first_row + offset, first_row + offset + len(token_ids))
            found += token_logprobs(self._logits(hidden, rows), token_ids, [one.num_prompt_logprobs] * len(token_ids))
        return found

    def _erase(self, slices: Sequence[SequenceSlice]) -> None:
        """Zero what these wrote: their blocks go to others, where even masked keys are multiplied."""
        _, _, slots, _ = _lay_flat(slices, self.block_size)
        self.kv.zero(torch.from_numpy(slots).to(self.device))


def _lay_flat(
    slices: Sequence[SequenceSlice], block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Span]]:
    """Token ids, positions and slots of all slices one after the other, int64 ``[tokens]``, and each slice's rows."""
    ids, positions, slots, spans, row = [], [], [], [], 0
    for one in slices:
        count, stop = len(one.token_ids), one.start + len(one.token_ids)
        ids.append(np.asarray(one.token_ids, dtype=np.int64))
        at = np.arange(one.start, stop)
        first_block = one.start // block_size
        blocks = np.asarray(one.block_ids[first_block : -(-stop // block_size)], dtype=np.int64)
        positions.append(at)
        slots.append(blocks[at // block_size - first_block] * block_size + at % block_size)
        spans.append(Span(row, count, stop, one.block_ids))
        row += count
    return np.concatenate(ids), np.concatenate(positions), np.concatenate(slots), spans


def _test_ids(count: int, vocab_size: int) -> list[int]:
    return [(7 * index * index + 3 * index + 11) % vocab_size for index in range(count)]


def _slice(request_id: str, token_ids: Sequence[int], start: int, block_ids: Sequence[int]) -> SequenceSlice:
    return SequenceSlice(request_id=request_id, token_ids=token_ids, start=start, block_ids=block_ids, sampling=None)
