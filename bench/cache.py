"""The cache's own speed and memory on this machine, beside floors and peers, in one run.

    python -P bench/cache.py [--quick]

Prints one JSON line per figure: ``value`` with its ``unit``, the ``goal`` it was built for, and ``ratio``, value over
``beside``, the floor or peer named in the line and measured in the same run. Times are the best of several rounds, in
which ours and theirs take turns, so that noise on a shared machine hits both; CPU time where one round is long.

Peers, in our own words: vLLM 0.32 hashes a block as one pickle or CBOR of (parent, tuple of ids, None); a plain pool
keeps an ``OrderedDict`` of free blocks and walks its dict block by block; a plain index keeps one bit mask of replicas
per key and walks key by key.
"""

import argparse
import gc
import hashlib
import json
import os
import pickle
import random
import sys
import time
import tracemalloc
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import cbor2
import xxhash

from cache.block_hash import ALGORITHMS, BlockChain, HashScheme, pack_keys
from cache.events import EventBatch, Removed, Snapshot, Stored, encode_snapshot, read_snapshot
from cache.prefix_cache import PrefixCache
from cache.prefix_index import PrefixIndex

BLOCK = 16
HASH_TOKENS = 8192
HASH_GOALS_NS = {"sha256": 57, "sha256_cbor": 60, "xxhash": 34, "xxhash_cbor": 32}
PROMPT_BLOCKS = 256
RUN_BLOCKS = 512


def report(bench: str, value: float, unit: str, goal: float, beside: str = "", other: float | None = None) -> None:
    line: dict[str, object] = {"bench": bench, "value": round(value, 4), "unit": unit, "goal": goal}
    if other is not None:
        line |= {"beside": beside, "theirs": round(other, 4), "ratio": round(value / other, 4)}
    print(json.dumps(line), flush=True)


def best_of(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Seconds of each call, the best of rounds in which they take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, spent in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            spent.append(time.perf_counter() - begin)
    return [min(spent) for spent in times]


def bench_hashing(rounds: int) -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(150_000) for _ in range(HASH_TOKENS)]
    for algorithm in ALGORITHMS:
        scheme = HashScheme(algorithm, BLOCK, "secret")
        digest = (lambda data: hashlib.sha256(data).digest()) if "sha" in algorithm else xxhash.xxh3_128_digest
        if "cbor" in algorithm:
            encode: Callable[[object], bytes] = lambda block: cbor2.dumps(block, canonical=True)  # noqa: E731
        else:
            encode = lambda block: pickle.dumps(block, protocol=5)  # noqa: E731

        def peer(digest: Callable[[bytes], bytes] = digest, encode: Callable[[object], bytes] = encode) -> bytes:
            parent = scheme.root  # noqa: B023 (called within the round)
            for start in range(0, HASH_TOKENS, BLOCK):
                parent = digest(encode((parent, tuple(tokens[start : start + BLOCK]), None)))
            return parent

        size = len(encode((scheme.root, tuple(tokens[:BLOCK]), None)))

        def floor(digest: Callable[[bytes], bytes] = digest, data: bytes = bytes(size)) -> None:
            for _ in range(HASH_TOKENS // BLOCK):
                digest(data)

        assert peer() == scheme.block_hashes(tokens)[-1]
        ours, theirs, raw = best_of(rounds, lambda: scheme.block_hashes(tokens), peer, floor)  # noqa: B023
        ns = 1e9 / HASH_TOKENS
        report(f"hash {algorithm}", ours * ns, "ns/token", HASH_GOALS_NS[algorithm], "vLLM's formula", theirs * ns)
        report(f"hash {algorithm} floor", ours * ns, "ns/token", HASH_GOALS_NS[algorithm], "raw digest", raw * ns)
    scheme = HashScheme()
    short, long = [7 + i % 90_000 for i in range(8_000)], [7 + i % 90_000 for i in range(1_000_000)]
    begin = time.process_time()
    for _ in range(125):
        scheme.block_hashes(short)
    done = time.process_time()
    scheme.block_hashes(long)
    theirs, ours = done - begin, time.process_time() - done
    report("hash 1 M tokens", ours, "s CPU", 125 * 8_000 * 60e-9, "8,000 tokens 125 times", theirs)


class PlainPool:
    """What one writes first: a dict of hashes, an ordered dict of free blocks, one block at a time."""

    def __init__(self, num_blocks: int) -> None:
        self.free_blocks = OrderedDict.fromkeys(range(1, num_blocks))
        self.users = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self.events: list[tuple[str, int]] = []

    def admit(self, hashes: Sequence[bytes]) -> list[int]:
        table = []
        for block_hash in hashes:
            block, _ = self.free_blocks.popitem(last=False)
            old = self.hash_of[block]
            if old is not None:
                del self.block_of[old]
                self.events.append(("removed", int.from_bytes(old[-8:], "big")))
            self.users[block] += 1
            self.hash_of[block] = block_hash
            self.block_of[block_hash] = block
            self.events.append(("stored", int.from_bytes(block_hash[-8:], "big")))
            table.append(block)
        self.events.clear()
        return table

    def match(self, hashes: Sequence[bytes]) -> int:
        count = 0
        for block_hash in hashes:
            if block_hash not in self.block_of:
                break
            count += 1
        return count

    def free(self, table: Sequence[int]) -> None:
        for block in reversed(table):
            self.users[block] -= 1
            if not self.users[block]:
                self.free_blocks[block] = None


def random_chain(scheme: HashScheme, num_blocks: int) -> BlockChain:
    """A chain of random hashes: the pool is measured, not the hashing."""
    chain = scheme.chain([])
    chain.token_ids.frombytes(bytes(4 * BLOCK * num_blocks))
    chain.hashes += [os.urandom(32) for _ in range(num_blocks)]
    chain.keys += pack_keys(chain.hashes)
    return chain


def pool_times(
    num_blocks: int, num_requests: int, beside_plain: bool, num_host_blocks: int = 0
) -> dict[str, tuple[float, float]]:
    """us per block of each operation, ours and the plain pool's, in pools that are full."""
    scheme = HashScheme()
    cache = PrefixCache(num_blocks, scheme, num_host_blocks=num_host_blocks)
    plain = PlainPool(num_blocks if beside_plain else 2)
    for number in range((num_blocks + num_host_blocks) // PROMPT_BLOCKS + 2):
        chain = random_chain(scheme, PROMPT_BLOCKS)
        cache.admit(number, chain)
        cache.commit(number, len(chain))
        cache.free(number)
        cache.take_events()
        if beside_plain:
            plain.free(plain.admit(chain.hashes))
    spent: dict[str, list[tuple[float, float]]] = {"admit": [], "match": [], "free": [], "hit": []}
    clock = time.perf_counter
    for number in range(num_requests):
        chain = random_chain(scheme, PROMPT_BLOCKS)
        name = ("measured", number)
        begin = clock()
        cache.admit(name, chain, number)
        cache.commit(name, len(chain))
        cache.take_events()
        cache.take_copies()
        admitted = clock()
        cache.match(chain)
        matched = clock()
        cache.free(name, number)
        freed = clock()
        cache.admit(("again", number), chain, number)
        hit = clock()
        cache.free(("again", number), number)
        cache.take_events()
        theirs = [0.0] * 4
        if beside_plain:
            theirs[0] = clock()
            table = plain.admit(chain.hashes)
            theirs[1] = clock()
            plain.match(chain.hashes)
            theirs[2] = clock()
            plain.free(table)
            theirs[3] = clock()
        spent["admit"].append((admitted - begin, theirs[1] - theirs[0]))
        spent["match"].append((matched - admitted, theirs[2] - theirs[1]))
        spent["free"].append((freed - matched, theirs[3] - theirs[2]))
        spent["hit"].append((hit - freed, 0.0))
    us = 1e6 / PROMPT_BLOCKS
    return {
        name: (min(ours for ours, _ in pairs) * us, min(other for _, other in pairs) * us)
        for name, pairs in spent.items()
    }


def bench_pool(quick: bool) -> None:
    small = pool_times(10_000, 300, beside_plain=True)
    for name, goal in (("admit", 1.0), ("match", 0.12), ("free", 0.1)):
        report(f"pool {name}", small[name][0], "us/block", goal, "a plain pool", small[name][1])
    tiered = pool_times(10_000, 300, beside_plain=False, num_host_blocks=40_000)
    for name in ("admit", "match"):
        report(f"pool {name}, host memory full too", tiered[name][0], "us/block", 3.0, "without", small[name][0])
    num_blocks = 100_000 if quick else 1_000_000
    scheme = HashScheme()
    (built_s,) = best_of(3, lambda: PrefixCache(num_blocks, scheme))
    report(f"pool of {num_blocks} built", built_s, "s", 1.0)
    tracemalloc.start()
    cache = PrefixCache(num_blocks, scheme)
    report("pool as built", tracemalloc.get_traced_memory()[0] / num_blocks, "B/block", 150)
    for number in range(num_blocks // PROMPT_BLOCKS):
        chain = random_chain(scheme, PROMPT_BLOCKS)
        cache.admit(number, chain)
        cache.commit(number, len(chain))
        cache.free(number)
        cache.take_events()
    del chain
    gc.collect()
    report("pool full", tracemalloc.get_traced_memory()[0] / num_blocks, "B/block", 350)
    tracemalloc.stop()
    begin = time.process_time()
    cache.snapshot()
    report("pool snapshot", (time.process_time() - begin) / num_blocks * 1e6, "us CPU/block", 1.5)
    del cache
    gc.collect()
    large = pool_times(num_blocks, 300, beside_plain=False)
    for name in ("admit", "match", "free", "hit"):
        report(f"pool {name} at {num_blocks}", large[name][0] / small[name][0], "times that at 10,000", 3)


def mask_walk(masks: dict[int, int], keys: "array[int]") -> dict[int, int]:
    """The plain index: depth of each replica by walking the keys with one mask of those who are still in."""
    depths: dict[int, int] = {}
    alive = -1
    for depth, key in enumerate(keys):
        mask = masks.get(key, 0)
        gone = alive & ~mask if depth else 0
        while gone > 0:
            lowest = gone & -gone
            depths[lowest.bit_length() - 1] = depth
            gone ^= lowest
        alive &= mask
        if not alive:
            break
    while alive > 0:
        lowest = alive & -alive
        depths[lowest.bit_length() - 1] = len(keys)
        alive ^= lowest
    return depths


def index_memory(chains: "Sequence[array[int]]", holders: Sequence[Sequence[str]]) -> int:
    """Bytes of an index of these chains, what the events themselves hold apart."""
    tracemalloc.start()
    index = PrefixIndex()
    seqs: dict[str, int] = {}
    for chain, held_by in zip(chains, holders, strict=True):
        for replica in held_by:
            seqs[replica] = seqs.get(replica, 0) + 1
            index.apply(replica, EventBatch(replica, "g", seqs[replica], (Stored(0, chain),)))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size + index.table_bytes


def bench_index(rounds: int) -> None:
    """1 M replica-blocks on 64 replicas; a third of the chains are held by half of them."""
    rng = random.Random(1)
    replicas = [f"w{number}" for number in range(64)]
    chains = [array("Q", rng.randbytes(8 * RUN_BLOCKS)) for _ in range(180)]
    holders = [rng.sample(replicas, 32) if number % 3 == 0 else [rng.choice(replicas)] for number in range(180)]
    seqs = dict.fromkeys(replicas, 0)
    index = PrefixIndex()

    def send(replica: str, event: Stored | Removed) -> float:
        batch = EventBatch(replica, "g", seqs[replica] + 1, (event,))
        seqs[replica] += 1
        begin = time.perf_counter()
        index.apply(replica, batch)
        return time.perf_counter() - begin

    pairs = [(chain, replica) for chain, held_by in zip(chains, holders, strict=True) for replica in held_by]
    store_s = [send(replica, Stored(0, chain)) for chain, replica in pairs]
    num_blocks = len(pairs) * RUN_BLOCKS
    report("index memory", index_memory(chains, holders) / num_blocks, "B/replica-block", 40)
    singly = [[held_by[0]] for held_by in holders]
    report(
        "index memory, nothing shared", index_memory(chains, singly) / len(chains) / RUN_BLOCKS, "B/replica-block", 60
    )

    masks: dict[int, int] = {}
    begin = time.perf_counter()
    for chain, replica in pairs:
        bit = 1 << replicas.index(replica)
        for key in chain:
            masks[key] = masks.get(key, 0) | bit
    plain_store_s = time.perf_counter() - begin
    us = 1e6 / num_blocks
    report("index store", sum(store_s) * us, "us/block", 0.4, "a dict of masks", plain_store_s * us)

    long = array("Q", rng.randbytes(8 * 8192))
    for replica in replicas[:32]:
        send(replica, Stored(0, long))
        for key in long:
            masks[key] = masks.get(key, 0) | 1 << replicas.index(replica)
    miss = array("Q", rng.randbytes(8 * RUN_BLOCKS))
    for name, keys, goal in (
        ("512", chains[0], 15),
        ("512 on one", chains[1], 15),
        ("8192", long, 60),
        ("miss", miss, 2),
    ):
        assert len(index.match(keys)) == len(mask_walk(masks, keys)), name
        ours, theirs = best_of(rounds, lambda: index.match(keys), lambda: mask_walk(masks, keys))  # noqa: B023
        report(f"index look-up {name}", ours * 1e6, "us", goal, "a dict of masks", theirs * 1e6)

    remove_s = [send(replica, Removed(array("Q", reversed(chain)))) for chain, replica in pairs]
    begin = time.perf_counter()
    for chain, replica in pairs:
        bit = 1 << replicas.index(replica)
        for key in chain:
            left = masks[key] & ~bit
            if left:
                masks[key] = left
            else:
                del masks[key]
    report("index remove", sum(remove_s) * us, "us/block", 0.3, "a dict of masks", (time.perf_counter() - begin) * us)
    index.check_invariants()


def bench_snapshot(num_blocks: int) -> None:
    """A replica's snapshot is taken in by parts, then it leaves: chains of 32 blocks, a third of them branches."""
    rng = random.Random(1)
    chains: list[Stored] = []
    while len(chains) * 32 < num_blocks:
        parent = rng.choice(rng.choice(chains).keys) if chains and rng.random() < 0.33 else 0
        chains.append(Stored(parent, array("Q", rng.randbytes(8 * 32))))
    data = encode_snapshot(Snapshot("w0", "g", 1, tuple(chains)))
    index = PrefixIndex()
    loading = index.loading(*read_snapshot(data))
    gc.collect()
    gc.disable()  # a router makes it rare (router/main.py): its pauses are no part's

    def part_times(go_on: Callable[[], bool]) -> list[float]:
        times, is_more = [], True
        while is_more:
            begin = time.process_time()
            is_more = go_on()
            times.append(time.process_time() - begin)
        return sorted(times)

    for name, go_on in (("taken in", lambda: next(loading, "end") != "end"), ("let go of", index.sweep)):
        if name == "let go of":
            index.drop("w0")
        times = part_times(go_on)
        what = f"snapshot of {num_blocks} blocks {name}"
        report(f"{what} by {len(times)} parts, in all", sum(times) * 1e3, "ms CPU", 3e-3 * num_blocks)
        report(f"{what}, a part", times[len(times) // 2] * 1e3, "ms CPU", 2.0)
        report(f"{what}, the longest part", times[-1] * 1e3, "ms CPU", 100.0)
    gc.enable()
    assert not len(index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and 100,000 blocks instead of a million")
    options = parser.parse_args()
    print(json.dumps({"python": sys.version.split()[0], "cpus": os.cpu_count()}))
    bench_hashing(11 if options.quick else 101)
    bench_pool(options.quick)
    bench_index(101 if options.quick else 1001)
    for num_blocks in (200_000,) if options.quick else (200_000, 1_000_000):
        bench_snapshot(num_blocks)


if __name__ == "__main__":
    main()
