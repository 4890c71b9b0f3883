"""Queues of idle blocks."""

import numpy as np

from cache.block_pool import BlockPool
from cache.prefix_cache import PrefixCache
from tests.cache.support import SCHEME, chain, run


def ids(*blocks: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    return np.array(blocks, dtype=np.int32)


def test_blocks_are_taken_from_the_front_of_the_lowest_class() -> None:
    pool = BlockPool(7)
    assert pool.in_order() == [1, 2, 3, 4, 5, 6]
    (taken,) = pool.take(4)
    assert taken[0].tolist() == [1, 2, 3, 4]
    assert pool.drop(ids(4, 3, 2)).tolist() == [4, 3, 2]
    pool.queue_back(ids(4), 5, now=1.0)
    pool.queue_back(ids(3), 0, now=1.0)
    pool.queue_front(ids(2), now=1.0)
    assert pool.in_order() == [2, 5, 6, 3, 4]
    pool.check_invariants()
    assert pool.peek() == (2, 1.0)
    pool.shift(0, 5, 2)
    assert pool.in_order() == [6, 3, 4, 2, 5]
    pool.merge_classes()
    assert pool.in_order() == [6, 3, 4, 2, 5]
    assert [blocks.tolist() for blocks, _ in pool.take(5)] == [[6], [3], [4], [2], [5]]
    assert pool.peek() is None
    pool.check_invariants()


def test_a_block_used_again_leaves_the_middle_of_its_queue() -> None:
    pool = BlockPool(6)
    pool.use(ids(3, 4))
    pool.use(ids(3))
    assert pool.in_order() == [1, 2, 5]
    assert pool.drop(ids(4, 3)).tolist() == [4]
    pool.queue_back(ids(4), 0, now=0.0)
    assert pool.in_order() == [1, 2, 5, 4]
    pool.check_invariants()


def test_dead_entries_are_swept_out_however_often_one_prefix_is_hit() -> None:
    for policy in ("lru", "slru"):
        cache = PrefixCache(40, SCHEME, policy=policy)  # type: ignore[arg-type]
        for number in range(300):
            run(cache, number, range(41), now=number)
        queues = cache._pool._queues.values()
        assert sum(queue.num_entries for queue in queues) <= len(queues) * (2 * 40 + 64 + 40)
        assert cache.match(chain(range(41))) == 40
