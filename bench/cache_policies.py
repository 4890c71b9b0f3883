"""Which eviction policy keeps the most? Hit rates over a trace, by the definition in docs/reference.md.

    python -P bench/cache_policies.py TRACE [--blocks 5000 10000 ...] [--block-size 16] [--host-times 4]

TRACE is JSON lines: Mooncake's format (``hash_ids`` of 512-token blocks; outputs take blocks while they run and leave
none), or lines with ``token_ids`` and ``output_token_ids`` (prompt and output without its last token stay cached).
Requests run one at a time, in order. ``lru`` and ``slru`` are the cache itself; the others are models of known
policies made prefix-closed, as every policy here must be: in the place of a block the end of its chain goes.

- ``s3fifo``: S3-FIFO (Yang et al., SOSP 2023): a small first queue, a main queue with reinsertion, a ghost list.
- ``slru-N``: segmented LRU with N % protected, to see how flat the choice is.
- ``slru+host``: ``slru`` with a host tier of ``--host-times`` as many blocks behind it; ``from host`` is the part of
  its hits that came back from there, ``large`` what one device with all those blocks would hit.
- ``clairvoyant``: evicts what is used again latest (Belady); nobody can do better by much.

Prints one JSON line per number of blocks.
"""

import argparse
import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cache.block_hash import BlockChain, HashScheme, pack_keys
from cache.eviction import EvictionPolicy
from cache.prefix_cache import PrefixCache
from cache.stats import CacheStats

MOONCAKE_BLOCK = 512
SHARES = (10, 20, 30, 50)


class Request(NamedTuple):
    """``names``: the full blocks that stay cached, in chain order; prompt and output lengths in tokens."""

    names: Sequence[int]
    num_prompt_tokens: int
    num_output_tokens: int


def read(path: Path, block_size: int) -> tuple[list[Request], int]:
    """The requests of a trace and the tokens per block."""
    requests: list[Request] = []
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if "hash_ids" in record:
                block_size = MOONCAKE_BLOCK
                num_full = record["input_length"] // block_size
                names = record["hash_ids"][:num_full]
                requests.append(Request(names, record["input_length"], record["output_length"]))
                continue
            prompt, output = record["token_ids"], record["output_token_ids"]
            tokens, name, names = (prompt + output)[:-1] if output else prompt, 0, []
            for end in range(block_size, len(tokens) + 1, block_size):
                name = known.setdefault((name, tuple(tokens[end - block_size : end])), len(known) + 1)
                names.append(name)
            requests.append(Request(names, len(prompt), len(output)))
    return requests, block_size


def cache_hit_rate(requests: Iterable[Request], num_blocks: int, block_size: int, policy: EvictionPolicy) -> float:
    """The production cache, fed with the trace's block names in the place of hashes."""
    stats = run_cache(requests, num_blocks, block_size, policy)
    return stats.num_hit_tokens / stats.num_query_tokens


def run_cache(
    requests: Iterable[Request], num_blocks: int, block_size: int, policy: EvictionPolicy, num_host_blocks: int = 0
) -> CacheStats:
    """Its counters after all requests."""
    scheme = HashScheme(block_size=block_size)
    cache = PrefixCache(num_blocks + 1, scheme, policy=policy, num_host_blocks=num_host_blocks)
    for number, request in enumerate(requests):
        chain = scheme.chain([])
        chain.token_ids.frombytes(bytes(4 * request.num_prompt_tokens))
        name_prompt(chain, request.names[: request.num_prompt_tokens // block_size])
        if cache.admit(number, chain) is None:
            continue
        num_kept = len(chain.hashes)
        if cache.num_free_blocks * block_size > request.num_output_tokens + block_size:
            name_prompt(chain, request.names)  # those of the answer, before its tokens would be hashed
            cache.append(number, bytes(4 * request.num_output_tokens))
            num_kept = len(request.names)
        cache.commit(number, num_kept * block_size)
        cache.free(number)
        cache.take_events()
        cache.take_copies()
    return cache.stats


def name_prompt(chain: BlockChain, names: Sequence[int]) -> None:
    """Give the next blocks of a chain the trace's names."""
    fresh = [(name + 1).to_bytes(32, "big") for name in names[len(chain.hashes) :]]
    chain.hashes += fresh
    chain.keys += pack_keys(fresh)


def segmented(requests: Iterable[Request], num_blocks: int, block_size: int, share: float) -> float:
    """Segmented LRU as a model: the production policy with another share protected."""
    ordinary: OrderedDict[int, None] = OrderedDict()
    protected: OrderedDict[int, None] = OrderedDict()
    rate = _Rate()
    for names, num_hit, num_new in rate.count(requests, block_size, lambda name: name in ordinary or name in protected):
        for name in names[:num_hit]:
            (ordinary if name in ordinary else protected).pop(name)
        while len(ordinary) + len(protected) + num_hit + num_new > num_blocks and (ordinary or protected):
            (ordinary or protected).popitem(last=False)
        for depth in range(len(names) - 1, -1, -1):
            name = names[depth]
            target = protected if depth < num_hit or name in protected else ordinary
            target.pop(name, None)
            target[name] = None
        while len(protected) > share * num_blocks:
            ordinary[protected.popitem(last=False)[0]] = None
    return rate.value


def s3fifo(requests: Iterable[Request], num_blocks: int, block_size: int) -> float:
    """S3-FIFO: 10 % small queue, ghosts for as many as the cache holds, frequencies up to 3."""
    small: OrderedDict[int, None] = OrderedDict()
    main: OrderedDict[int, None] = OrderedDict()
    ghosts: OrderedDict[int, None] = OrderedDict()
    frequency: dict[int, int] = {}
    parent: dict[int, int | None] = {}
    children: dict[int | None, set[int]] = {}

    def evict(used: set[int]) -> None:
        while True:
            from_small = bool(small) and (len(small) > num_blocks // 10 or not main)
            queue = small if from_small else main
            name = next(iter(queue))
            if name in used or frequency[name] > (1 if from_small else 0):
                frequency[name] = 0 if from_small else max(0, frequency[name] - 1)
                del queue[name]
                main[name] = None
                continue
            while children.get(name):  # its turn has come: the end of its chain goes in its place
                name = next(iter(children[name]))
            if name in small:
                ghosts[name] = None
                if len(ghosts) > num_blocks:
                    ghosts.popitem(last=False)
            small.pop(name, None)
            main.pop(name, None)
            del frequency[name]
            children[parent.pop(name)].discard(name)
            return

    rate = _Rate()
    for names, num_hit, num_new in rate.count(requests, block_size, frequency.__contains__):
        used = set(names[:num_hit])
        for name in used:
            frequency[name] = min(3, frequency[name] + 1)
        while len(frequency) + num_new > num_blocks and len(frequency) > num_hit:
            evict(used)
        for depth in range(len(names) - 1, -1, -1):
            name = names[depth]
            if name not in frequency:
                frequency[name] = 0
                parent[name] = names[depth - 1] if depth else None
                children.setdefault(parent[name], set()).add(name)
                (main if ghosts.pop(name, 0) is None else small)[name] = None
    return rate.value


def clairvoyant(requests: Sequence[Request], num_blocks: int, block_size: int) -> float:
    """Evict what is used again latest; of one chain its end first."""
    next_use: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        next_use.append([seen.get(name, len(requests)) for name in requests[number].names])
        seen |= dict.fromkeys(requests[number].names, number)
    next_use.reverse()
    held: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    rate = _Rate()
    for number, (names, num_hit, num_new) in enumerate(rate.count(requests, block_size, held.__contains__)):
        used = set(names[:num_hit])
        while len(held) + num_new > num_blocks and heap:
            use, _, name = heapq.heappop(heap)
            if name not in used and held.get(name) == -use:
                del held[name]
        for depth, name in enumerate(names):
            held[name] = next_use[number][depth]
            heapq.heappush(heap, (-held[name], -depth, name))
    return rate.value


class _Rate:
    """Walks the requests and counts hits: leading blocks that are held, never the last token."""

    def __init__(self) -> None:
        self._num_hit = self._num_asked = 0

    def count(
        self, requests: Iterable[Request], block_size: int, is_held: Callable[[int], bool]
    ) -> Iterator[tuple[Sequence[int], int, int]]:
        """(names, leading hits, blocks to allocate) of each request, before it changes the cache."""
        for request in requests:
            limit = min(len(request.names), (request.num_prompt_tokens - 1) // block_size)
            num_hit = next((depth for depth in range(limit) if not is_held(request.names[depth])), limit)
            self._num_hit += num_hit * block_size
            self._num_asked += request.num_prompt_tokens
            num_tokens = request.num_prompt_tokens + request.num_output_tokens
            yield request.names, num_hit, -(-num_tokens // block_size) - num_hit

    @property
    def value(self) -> float:
        return self._num_hit / self._num_asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[5_000, 10_000, 20_000, 50_000])
    parser.add_argument("--block-size", type=int, default=16, help="for traces with token ids")
    parser.add_argument("--host-times", type=int, default=4, help="blocks of the host tier, times those of the device")
    options = parser.parse_args()
    requests, block_size = read(options.trace, options.block_size)
    for num_blocks in options.blocks:
        num_host_blocks = options.host_times * num_blocks
        tiered = run_cache(requests, num_blocks, block_size, "slru", num_host_blocks)
        rates = {
            "lru": cache_hit_rate(requests, num_blocks, block_size, "lru"),
            "slru": cache_hit_rate(requests, num_blocks, block_size, "slru"),
            "slru+host": tiered.num_hit_tokens / tiered.num_query_tokens,
            "from host": tiered.num_host_hit_tokens / tiered.num_hit_tokens,
            "large": cache_hit_rate(requests, num_blocks + num_host_blocks, block_size, "slru"),
            "s3fifo": s3fifo(requests, num_blocks, block_size),
            **{f"slru-{share}": segmented(requests, num_blocks, block_size, share / 100) for share in SHARES},
            "clairvoyant": clairvoyant(requests, num_blocks, block_size),
        }
        rounded = {name: round(rate, 4) for name, rate in rates.items()}
        print(json.dumps({"trace": options.trace.name, "blocks": num_blocks, "block_size": block_size, **rounded}))


if __name__ == "__main__":
    main()
