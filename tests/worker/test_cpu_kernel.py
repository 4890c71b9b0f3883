"""The compiled kernel's operators against torch in float32, at sizes that fill no tile evenly."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from worker.cpu_kernel import obstacle
from worker.kv_store import KVStore, kv_format
from worker.models.ops import Heads, TorchOps

CPU, BF16 = torch.device("cpu"), torch.bfloat16
REASON = obstacle(BF16, CPU)
built = pytest.mark.skipif(REASON is not None, reason=f"no compiled kernel: {REASON}")
ROWS = [1, 2, 3, 4, 5, 6, 7, 13, 121, 250]


def kernel_ops(threads: int = 2) -> Any:
    from worker.cpu_kernel.ops import KernelOps

    return KernelOps(threads)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def assert_close(found: Tensor, wanted: Tensor, share: float = 2**-8) -> None:
    """Within a share of the largest number: bfloat16's rounding."""
    torch.testing.assert_close(found.float(), wanted, atol=share * float(wanted.abs().max()), rtol=2**-8)


@built
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_torch(rows: int, has_bias: bool) -> None:
    for columns, depth in ((16, 2), (75, 58), (160, 64), (33, 130)):
        x, weight, residual = numbers(rows, depth), numbers(columns, depth, seed=2), numbers(rows, columns, seed=3)
        bias = numbers(columns, seed=4) if has_bias else None
        linear = kernel_ops().linear(weight, bias)
        wanted = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        assert_close(linear(x), wanted)
        assert_close(linear.plus(x, residual), wanted + residual.float())
        torch.testing.assert_close(linear.wide(x), wanted, atol=1e-4, rtol=1e-5)


@built
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_layer_is_silu_of_one_product_times_another(rows: int, has_bias: bool) -> None:
    x, gate, up = numbers(rows, 64), numbers(48, 64, seed=2), numbers(48, 64, seed=3)
    biases = (numbers(48, seed=4), numbers(48, seed=5)) if has_bias else (None, None)
    gated = kernel_ops().gated(gate, up, *biases)
    g, u = (
        functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        for weight, bias in ((gate, biases[0]), (up, biases[1]))
    )
    assert_close(gated(x), functional.silu(g) * u)
    parts = gated.parts(x)
    for found, wanted in zip(parts, (g, u), strict=True):
        assert_close(found, wanted)
    assert_close(gated.combine(*parts), functional.silu(g) * u)


@built
@pytest.mark.parametrize("width", [16, 70, 576])
def test_rms_norm_is_that_of_torch(width: int) -> None:
    x, weight = numbers(5, width), numbers(width, seed=2)
    wanted = functional.rms_norm(x.float(), (width,), weight.float(), 1e-5)
    assert_close(kernel_ops().rms_norm(x, weight, 1e-5), wanted)


@built
@pytest.mark.parametrize("turn", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_heads_are_normed_turned_and_stored_as_by_torch(turn: bool, normed: bool, kept: str) -> None:
    rows, head_dim = 9, 64
    norms = (numbers(head_dim, seed=2), numbers(head_dim, seed=3)) if normed else (None, None)
    heads = Heads(6, 2, head_dim, 1e-6, *norms, turn=turn)
    angles = torch.rand(rows, 1, 1, head_dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    cosines, sines = (torch.cat((one, sign * one), dim=2) for one, sign in ((angles.cos(), 1), (-angles.sin(), -1)))
    slots = torch.tensor([17, 40, 3, 4, 5, 60, 22, 21, 63])
    found, wanted = (
        _rotated(ops, heads, (cosines.to(BF16), sines.to(BF16)), slots, kept)
        for ops in (kernel_ops(), TorchOps(exact=False))
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other.float(), share=2**-8 if kept == "auto" else 2**-6)  # int8: a step to either side


def _rotated(ops: Any, heads: Heads, angles: Any, slots: Tensor, kept: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values as they stand in the store."""
    store = KVStore(
        num_layers=2,
        num_blocks=8,
        block_size=8,
        num_kv_heads=2,
        head_dim=64,
        dtype=BF16,
        device=CPU,
        kept=kv_format(kept, BF16),
    )
    queries = ops.rotate(numbers(9, 10 * 64), heads, angles, store, 1, slots)
    assert not store.data[0].any()
    keys, values = (pages.blocks(torch.arange(8)) for pages in store.layers[1])
    return queries, keys, values


@built
def test_a_row_depends_on_neither_its_neighbours_nor_the_number_of_threads() -> None:
    x, weight = numbers(250, 64), numbers(100, 64, seed=2)
    whole = kernel_ops(1).linear(weight)(x)
    for rows in ROWS:
        assert torch.equal(kernel_ops(3).linear(weight)(x[100 : 100 + rows].contiguous()), whole[100 : 100 + rows])


@built
def test_a_number_that_is_none_stays_in_its_row() -> None:
    x, weight = numbers(8, 64), numbers(48, 64, seed=2)
    x[3, 5] = float("nan")
    for found in (kernel_ops().linear(weight)(x), kernel_ops().gated(weight, weight, None, None)(x)):
        assert found[3].isnan().all()
        assert found[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()


def test_what_the_kernel_cannot_compute_is_named() -> None:
    assert obstacle(torch.float32, CPU) == "it computes bfloat16, not float32"
    assert obstacle(BF16, torch.device("cuda")) == "it is for CPUs"
