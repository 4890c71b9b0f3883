"""What the KV store gives back of what was written: exactly, or within the step of its format."""

import pytest
import torch
from torch import Tensor

from worker.kv_store import KVStore, kv_format

CPU = torch.device("cpu")
STEPS = {"int8": 1 / 127, "fp8": 32 / 448}  # between neighbours near the largest number, as shares of it


def store_of(kept: str, dtype: torch.dtype = torch.float32, num_layers: int = 1) -> KVStore:
    return KVStore(
        num_layers=num_layers,
        num_blocks=5,
        block_size=8,
        num_kv_heads=2,
        head_dim=16,
        dtype=dtype,
        device=CPU,
        kept=kv_format(kept, dtype),
    )


def kept_numbers(kept: str, numbers: Tensor) -> Tensor:
    """``numbers`` [tokens, 2, 16] as keys, written from block 1 on and read back in both of the ways there are."""
    store = store_of(kept, numbers.dtype)
    store.write(0, torch.arange(8, 8 + len(numbers)), numbers, numbers)
    keys, values = store.layers[0]
    whole = keys.blocks(torch.tensor([1, 2])).flatten(0, 1)[: len(numbers)]
    rows = torch.arange(16, 16 + 2 * len(numbers))  # slot * kv_heads + head
    by_head = torch.empty(2 * len(numbers), 16, dtype=numbers.dtype)
    values.heads_into(by_head, rows)
    torch.testing.assert_close(by_head.view_as(whole), whole, atol=0, rtol=0, equal_nan=True)
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_scaled_comes_back_as_it_was(dtype: torch.dtype) -> None:
    numbers = torch.randn(9, 2, 16).to(dtype)
    assert torch.equal(kept_numbers("auto", numbers), numbers)
    assert torch.equal(kept_numbers("float32", numbers), numbers)
    assert torch.equal(kept_numbers("bfloat16", numbers), numbers.bfloat16().to(dtype))


@pytest.mark.parametrize("kept", STEPS)
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e4, 1e30])
def test_a_scaled_number_is_off_by_half_a_step_of_its_own_head_at_most(kept: str, size: float) -> None:
    numbers = torch.randn(9, 2, 16) * size * torch.tensor([1.0, 1000.0])[:, None]
    largest = numbers.abs().amax(dim=-1, keepdim=True)
    error = (kept_numbers(kept, numbers) - numbers).abs() / largest
    assert float(error.max()) <= STEPS[kept] / 2 * 1.01  # the scale itself is rounded to 8 bits


@pytest.mark.parametrize("kept", STEPS)
def test_zeros_stay_zeros_and_what_is_no_number_stays_none(kept: str) -> None:
    numbers = torch.randn(9, 2, 16)
    numbers[2], numbers[3, 0], numbers[4, 1, 5], numbers[5, 0, 7] = 0.0, 0.0, float("nan"), float("inf")
    found = kept_numbers(kept, numbers)
    assert not found[2].any()
    assert not found[3, 0].any()
    assert torch.isnan(found[4, 1]).all()
    assert not torch.isfinite(found[5, 0]).any()
    assert torch.isfinite(found[[0, 1, 2, 3, 6, 7, 8]]).all()


def test_every_byte_of_fp8_means_what_torch_says_it_means() -> None:
    store = store_of("fp8")
    every = torch.arange(256, dtype=torch.uint8)
    keys = store.layers[0][0]
    keys.data.view(-1)[:256] = every
    assert keys.scales is not None
    keys.scales.fill_(1)
    found = keys.blocks(torch.tensor([0])).flatten()
    torch.testing.assert_close(found, every.view(torch.float8_e4m3fn).float(), equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("kept", STEPS)
def test_what_a_token_is_kept_as_depends_on_neither_its_neighbours_nor_its_place(kept: str) -> None:
    numbers = torch.randn(16, 2, 16).bfloat16()
    together = kept_numbers(kept, numbers)
    for token in range(16):
        assert torch.equal(kept_numbers(kept, numbers[token : token + 1])[0], together[token])


@pytest.mark.parametrize("kept", ["auto", "int8", "fp8"])
def test_copied_slots_hold_the_same_numbers_in_every_layer_and_the_rest_is_left_alone(kept: str) -> None:
    store = store_of(kept, num_layers=2)
    slots, source, target = torch.arange(8, 16), torch.tensor([1]), torch.tensor([3])
    for layer in range(2):
        store.write(layer, slots, torch.randn(8, 2, 16) * 10, torch.randn(8, 2, 16))
    store.copy_slots([(1, 3, 5)])
    for both in store.layers:
        for pages in both:
            assert torch.equal(pages.blocks(target)[0, :5], pages.blocks(source)[0, :5])
            assert pages.blocks(source).any()
            assert not pages.blocks(target)[0, 5:].any()
    store.zero(slots)
    assert not any(pages.blocks(source).any() for both in store.layers for pages in both)


def test_one_byte_per_number_and_two_per_head_hold_nearly_twice_the_tokens() -> None:
    assert store_of("auto", torch.bfloat16).bytes_per_token == 2 * 2 * 16 * 2
    assert store_of("int8", torch.bfloat16).bytes_per_token == 2 * 2 * (16 + 2)
