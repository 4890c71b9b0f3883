"""Every attention backend against the definition: softmax over the keys a row may see."""

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from worker.attention import Span, make_backend
from worker.cpu_kernel import obstacle
from worker.kv_store import KVStore, Pages, kv_format

CPU = torch.device("cpu")
# Triton's interpreter wants TRITON_INTERPRET=1, triton 3.6 and numpy below 2.3: an environment of its own.
INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
REASON = obstacle(torch.bfloat16, CPU)
COMPILED = pytest.mark.skipif(REASON is not None, reason=f"no compiled kernel: {REASON}")
BACKENDS_HERE = ["sdpa", "tiled", pytest.param("triton", marks=INTERPRETED)]
CASES: dict[str, list[tuple[int, int]]] = {  # (rows, keys) of each sequence
    "one decode row": [(1, 33)],
    "a whole prompt": [(40, 40)],
    "a chunk on warm blocks": [(7, 71)],
    "several tiles": [(600, 650)],
    "decode rows of all lengths": [(1, 1), (1, 16), (1, 17), (1, 200), (1, 700), (1, 640)],
    "decode rows far along": [(1, 2500), (1, 129), (1, 128)],
    "everything at once": [(1, 5), (1, 300), (20, 20), (3, 90), (1, 64)],
}


def by_definition(queries: Tensor, k: Tensor, v: Tensor, num_keys: int) -> Tensor:
    """``queries`` [rows, heads, d] are the last rows of a sequence whose ``k``, ``v`` are [keys, kv_heads, d]."""
    rows, heads, head_dim = queries.shape
    group = heads // k.shape[1]
    out = torch.empty_like(queries)
    for row in range(rows):
        seen = num_keys - rows + row + 1
        for head in range(heads):
            scores = k[:seen, head // group] @ queries[row, head] / math.sqrt(head_dim)
            out[row, head] = torch.softmax(scores, 0) @ v[:seen, head // group]
    return out.flatten(1)


def random_pages(
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    kept: str,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
) -> tuple[Pages, Pages]:
    """Keys and values of one layer, written as a step writes them: numbers of very different size per token."""
    store = KVStore(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=CPU,
        kept=kv_format(kept, dtype),
    )
    numbers = torch.randn(2, num_blocks * block_size, num_kv_heads, head_dim)
    numbers *= torch.rand(num_blocks * block_size, 1, 1) * 2
    store.write(0, torch.arange(num_blocks * block_size), *numbers.to(dtype))
    return store.layers[0]


@pytest.mark.parametrize("name", BACKENDS_HERE)
@pytest.mark.parametrize(
    ("heads", "kept"),
    [((4, 4), "auto"), ((6, 2), "auto"), ((8, 1), "auto"), ((6, 2), "bfloat16"), ((6, 2), "int8"), ((6, 2), "fp8")],
)
@pytest.mark.parametrize("case", CASES)
def test_backends_follow_the_definition(name: str, heads: tuple[int, int], kept: str, case: str) -> None:
    check_definition(name, heads, 8, torch.float32, kept, CASES[case], atol=1e-5)


@COMPILED
@pytest.mark.parametrize("block_size", [8, 16, 20])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 4), 64), ((9, 3), 64), ((7, 1), 32), ((12, 2), 128), ((64, 1), 32)]
)
@pytest.mark.parametrize("case", CASES)
def test_the_compiled_backend_follows_the_definition(
    heads: tuple[int, int], head_dim: int, block_size: int, case: str
) -> None:
    check_definition("avx512", heads, head_dim, torch.bfloat16, "auto", CASES[case], atol=2e-2, block_size=block_size)


def check_definition(
    name: str,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    kept: str,
    case: list[tuple[int, int]],
    *,
    atol: float,
    block_size: int = 16,
) -> None:
    torch.manual_seed(1)
    num_heads, num_kv_heads = heads
    num_blocks = 3200 // block_size
    keys, values = random_pages(num_blocks, num_kv_heads, head_dim, kept, dtype, block_size)
    shuffled = (torch.randperm(num_blocks - 1) + 1).tolist()
    spans, first_row = [], 0
    for num_rows, num_keys in case:
        table = [shuffled.pop() for _ in range(-(-num_keys // block_size))]
        spans.append(Span(first_row, num_rows, num_keys, table))
        first_row += num_rows
    queries = torch.randn(first_row + 3, num_heads, head_dim).to(dtype)  # three rows of padding
    backend: Any = make_backend(
        name,
        deterministic=False,
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=CPU,
    )
    out = backend.attend(queries, keys, values, backend.plan(spans, len(queries)))
    assert out.shape == (len(queries), num_heads * head_dim)
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        table = torch.tensor(span.block_ids)
        k, v = (pages.blocks(table).flatten(0, 1)[: span.num_keys].float() for pages in (keys, values))
        wanted = by_definition(queries[rows].float(), k, v, span.num_keys)
        torch.testing.assert_close(out[rows].float(), wanted, atol=atol, rtol=0)


@INTERPRETED
@pytest.mark.parametrize("kept", ["auto", "int8", "fp8"])
@pytest.mark.parametrize(("rows", "num_keys"), [(20, 50), (1, 33), (1, 1500)])
def test_a_sequence_alone_equals_itself_in_any_batch_bit_for_bit_in_the_triton_kernels(
    kept: str, rows: int, num_keys: int
) -> None:
    torch.manual_seed(2)
    keys, values = random_pages(160, 2, 8, kept)
    backend: Any = make_backend(
        "triton",
        deterministic=False,
        block_size=16,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=CPU,
    )
    queries = torch.randn(60, 6, 8)
    one = Span(5, rows, num_keys, range(3, 3 + -(-num_keys // 16)))
    decoding = [Span(30 + row, 1, 60 * row + 1, range(20 + row, 40 + row * 5)) for row in range(9)]
    reading = [Span(0, 4, 4, [7]), Span(40, 15, 70, range(100, 105))]

    def answer(*spans: Span) -> Tensor:
        return backend.attend(queries, keys, values, backend.plan(spans, 60))[5 : 5 + rows]

    alone = answer(one)
    for batch in ([*decoding, one], [one, *reading], [*reading, *decoding, one]):
        assert torch.equal(answer(*batch), alone)
    if rows == 1:  # as a recorded step plans it
        buffers = backend.decode_buffers(16, 200)
        moved = replace(one, first_row=0)
        backend.refill(buffers, [moved, *decoding[:2]], 4)
        plan = backend.first_rows(buffers, 4)
        assert torch.equal(backend.attend(queries[5:9], keys, values, plan)[:1], alone)
