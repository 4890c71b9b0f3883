"""What the KV store gives back of what was written: exactly, or within the step of its format."""

import pytest
import torch
from torch import Tensor

from cache.events import Tier
from cache.prefix_cache import BlockCopies
from worker.kv_store import KVStore, kv_format

CPU = torch.device("cpu")
STEPS = {"int8": 1 / 127, "fp8": 32 / 448}  # between neighbours near the largest number, as shares of it


def store_of(
    kept: str,
    dtype: torch.dtype = torch.float32,
    num_layers: int = 1,
    num_blocks: int = 5,
    num_host_blocks: int = 0,
    device: torch.device = CPU,
) -> KVStore:
    return KVStore(
        num_layers=num_layers,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        block_size=8,
        num_kv_heads=2,
        head_dim=16,
        dtype=dtype,
        device=device,
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
    store.copy([BlockCopies([1], [3], 5)])
    for both in store.layers:
        for pages in both:
            assert torch.equal(pages.blocks(target)[0, :5], pages.blocks(source)[0, :5])
            assert pages.blocks(source).any()
            assert not pages.blocks(target)[0, 5:].any()
    store.zero(slots)
    assert not any(pages.blocks(source).any() for both in store.layers for pages in both)


DEVICES = [
    CPU,
    pytest.param(torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", ["auto", "int8", "fp8"])
def test_under_churn_blocks_keep_every_bit_through_host_memory(kept: str, device: torch.device) -> None:
    """Random copies both ways and writes between them; each block must hold what a plain list of tensors holds."""
    store = store_of(kept, num_layers=2, num_blocks=12, num_host_blocks=20, device=device)
    assert store.host is not None
    random = torch.Generator().manual_seed(5)
    on_device = {block: bits(store, block) for block in range(1, 12)}
    in_host: dict[int, list[Tensor]] = {}

    def some(of: range | list[int], count: int) -> list[int]:
        return [of[index] for index in torch.randperm(len(of), generator=random)[:count].tolist()]

    for step in range(300):
        sources, places = some(range(1, 12), 4), some(range(1, 21), 4)
        places[3] = places[0] if step % 7 == 0 else places[3]  # twice in one batch: the later one stays
        copies = [BlockCopies(sources, places, 8, Tier.DEVICE, Tier.HOST)]
        in_host |= {place: on_device[source] for source, place in zip(sources, places, strict=True)}
        back, targets = some(list(in_host), 3), some(range(1, 12), 3)
        targets = targets[: len(back)]
        copies.append(BlockCopies(back, targets, 8, Tier.HOST, Tier.DEVICE))
        on_device |= {target: in_host[place] for place, target in zip(back, targets, strict=True)}
        store.copy(copies)
        written = some(range(1, 12), 2)
        for block in written:
            slots = torch.arange(block * 8, block * 8 + 8, device=device)
            for layer in range(2):
                numbers = torch.randn(2, 8, 2, 16, generator=random).to(device)
                store.write(layer, slots, numbers[0], numbers[1])
            on_device[block] = bits(store, block)
        for block, held in on_device.items():
            assert all(torch.equal(one, two) for one, two in zip(bits(store, block), held, strict=True)), block


def bits(store: KVStore, block: int) -> list[Tensor]:
    return [one[:, :, block].cpu().clone() for one in store._tensors]


def test_more_blocks_than_a_buffer_holds_are_copied_in_parts() -> None:
    store = store_of("auto", num_layers=1, num_blocks=12, num_host_blocks=11)
    assert store.host is not None
    store.host._at_once = 3
    before = torch.randn(96, 2, 16)
    store.write(0, torch.arange(96), before, before)
    blocks = list(range(1, 12))
    store.copy([BlockCopies(blocks, blocks[::-1], 8, Tier.DEVICE, Tier.HOST)])
    store.zero(torch.arange(96))
    store.copy([BlockCopies(blocks[::-1], blocks, 8, Tier.HOST, Tier.DEVICE)])
    assert torch.equal(store.layers[0][0].blocks(torch.arange(1, 12)).flatten(0, 1), before[8:])


def test_the_speed_of_host_memory_is_measured_and_leaves_blocks_as_they_are() -> None:
    store = store_of("int8", num_blocks=12, num_host_blocks=4)
    assert store.host is not None
    numbers = torch.randn(96, 2, 16)
    store.write(0, torch.arange(96), numbers, numbers)
    before = [bits(store, block) for block in range(12)]
    assert store.host.blocks_per_s() > 0
    for block, held in enumerate(before):
        assert all(torch.equal(one, two) for one, two in zip(bits(store, block), held, strict=True))


def test_one_byte_per_number_and_two_per_head_hold_nearly_twice_the_tokens() -> None:
    assert store_of("auto", torch.bfloat16).bytes_per_token == 2 * 2 * 16 * 2
    assert store_of("int8", torch.bfloat16).bytes_per_token == 2 * 2 * (16 + 2)
