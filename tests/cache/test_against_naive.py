"""Random requests drive the cache and a naive one side by side; they must agree on everything after every step."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache.block_hash import HashScheme
from cache.events import Tier
from cache.prefix_cache import PrefixCache
from cache.retention import Retention, RetentionBudget
from tests.cache.naive import NaiveCache
from tests.cache.support import EventLog, chain, resident_of

# Tokens of two kinds in short prompts over few blocks: fronts meet, blocks are short and evicted all the time.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from([None, None, None, "s"])
MARKS = st.lists(
    st.builds(Retention, num_tokens=st.integers(1, 14), ttl_s=st.sampled_from([2.0, 9.0]), priority=st.integers(0, 2)),
    max_size=2,
)


def moves_of(cache: PrefixCache) -> list[tuple[str, int, int, int]]:
    """Block by block, as the naive cache notes them."""
    kinds = {(Tier.DEVICE, Tier.DEVICE): "device", (Tier.DEVICE, Tier.HOST): "out", (Tier.HOST, Tier.DEVICE): "back"}
    return [
        (kinds[copies.source_tier, copies.target_tier], source, target, copies.num_tokens)
        for copies in cache.take_copies()
        for source, target in zip(copies.sources, copies.targets, strict=True)
    ]


class CacheMachine(RuleBasedStateMachine):
    policy = "lru"
    reuse_min: int | None = None
    retention = False
    algorithm = "sha256_cbor"
    max_host_blocks = 0

    @initialize(num_blocks=st.integers(6, 16), block_size=st.sampled_from([1, 3, 4]), data=st.data())
    def start(self, num_blocks: int, block_size: int, data: st.DataObject) -> None:
        host = data.draw(st.integers(min(1, self.max_host_blocks), self.max_host_blocks), label="host blocks")
        self.scheme = HashScheme(self.algorithm, block_size, "seed")
        budget = RetentionBudget(num_blocks // 2, num_blocks // 3)
        options: dict[str, Any] = {"policy": self.policy, "token_reuse_min": self.reuse_min, "retention": budget}
        self.cache = PrefixCache(num_blocks, self.scheme, history_size=8, num_host_blocks=host, **options)
        self.naive = NaiveCache(num_blocks, self.scheme, self.policy, self.reuse_min, budget, host)
        self.log = EventLog()
        self.now = 0.0
        self.num_requests = 0
        self.num_query_tokens = self.num_hit_tokens = self.num_host_hit_tokens = 0

    def name(self, number: int) -> object:
        return sorted(self.naive.running, key=str)[number % len(self.naive.running)]

    @rule(tokens=TOKENS, salt=SALTS, marks=MARKS, tenant=st.sampled_from(["t", "u"]), commit=st.booleans())
    def admit(self, tokens: list[int], salt: str | None, marks: list[Retention], tenant: str, commit: bool) -> None:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        marks = marks if self.retention else []
        prompt = chain(tokens, salt, self.scheme)
        match = self.cache.match(prompt)
        assert match == self.naive.num_hits(salt, tokens) * self.scheme.block_size
        assert self.cache.pending(prompt) == self.naive.pending(salt, tokens)
        expected = self.naive.admit(name, salt, tokens, self.now, marks, tenant)
        admission = self.cache.admit(name, prompt, self.now, retention=marks, tenant=tenant)
        if expected is None or admission is None:
            assert admission is expected
            return
        assert (admission.num_cached_tokens, list(admission.block_ids), admission.num_host_tokens) == expected
        assert match <= admission.num_cached_tokens < len(tokens)
        self.num_query_tokens += len(tokens)
        self.num_hit_tokens += admission.num_cached_tokens
        self.num_host_hit_tokens += admission.num_host_tokens
        if commit:
            self.naive.commit(name, len(tokens))
            self.cache.commit(name, len(tokens))

    @precondition(lambda self: self.naive.running)
    @rule(number=st.integers(0, 99), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), commit=st.booleans())
    def append(self, number: int, tokens: list[int], commit: bool) -> None:
        name = self.name(number)
        assert self.cache.append(name, tokens, self.now) == self.naive.append(name, tokens, self.now)
        if commit:
            # The last token was only just drawn: its KV comes with the next step.
            num_computed = len(self.naive.running[name].tokens) - 1
            self.naive.commit(name, num_computed)
            self.cache.commit(name, num_computed)

    @precondition(lambda self: self.naive.running)
    @rule(number=st.integers(0, 99), share=st.floats(0, 1))
    def commit(self, number: int, share: float) -> None:
        name = self.name(number)
        num_computed = round(share * len(self.naive.running[name].tokens))
        self.naive.commit(name, num_computed)
        self.cache.commit(name, num_computed)

    @precondition(lambda self: self.naive.running)
    @rule(number=st.integers(0, 99), recompute=st.booleans())
    def free(self, number: int, recompute: bool) -> None:
        name = self.name(number)
        self.naive.free(name, self.now, recompute)
        self.cache.free(name, self.now, recompute)

    @rule(tokens=TOKENS, salt=SALTS)
    def renew(self, tokens: list[int], salt: str | None) -> None:
        self.naive.renew(salt, tokens, self.now)
        self.cache.renew(chain(tokens, salt, self.scheme), self.now)

    @rule(elapsed_s=st.sampled_from([0.5, 1.0, 5.0]))
    def wait(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @rule()
    def reset(self) -> None:
        if not self.naive.running:
            self.naive.reset()
            assert self.cache.reset()
        else:
            assert not self.cache.reset()

    @invariant()
    def agree(self) -> None:
        cache, naive = self.cache, self.naive
        cache.check_invariants()
        assert cache.free_queue() == naive.order()
        assert cache.num_free_blocks == len(naive.order())
        assert cache.num_used_blocks == sum(users > 0 for users in naive.users)
        assert cache.num_cached_blocks == len(naive.copies)
        assert cache.num_retained_blocks == len(naive.marks)
        stats = cache.stats
        assert stats.num_query_tokens == self.num_query_tokens
        assert (stats.num_hit_tokens, stats.num_host_hit_tokens) == (self.num_hit_tokens, self.num_host_hit_tokens)
        assert moves_of(cache) == naive.moves
        naive.moves.clear()
        assert cache.host_queue() == naive.doubles + naive.alone
        assert set(cache.host_block_hashes()) == set(naive.in_host.values())
        assert cache.num_host_cached_blocks == len(naive.in_host)
        self.log.read(cache.take_events())
        for tier, keys in self.log.tiers.items():
            assert keys == resident_of(cache.snapshot(), tier)
        assert len(self.log.resident) == len(naive.copies)
        assert len(self.log.tiers[Tier.HOST]) == len(naive.in_host)
        assert cache.last_seq == cache.snapshot().seq == self.log.seq


class SegmentedMachine(CacheMachine):
    policy = "slru"


class RetentionMachine(CacheMachine):
    policy = "slru"
    retention = True


class TokenReuseMachine(CacheMachine):
    reuse_min = 2


class EverythingMachine(CacheMachine):
    policy = "slru"
    retention = True
    reuse_min = 1
    algorithm = "xxhash_cbor"


class HostTierMachine(CacheMachine):
    max_host_blocks = 20


class EverythingInTwoTiersMachine(EverythingMachine):
    max_host_blocks = 12


@pytest.mark.parametrize(
    "machine",
    [
        CacheMachine,
        SegmentedMachine,
        RetentionMachine,
        TokenReuseMachine,
        EverythingMachine,
        HostTierMachine,
        EverythingInTwoTiersMachine,
    ],
)
def test_the_cache_agrees_with_the_naive_one_after_every_step(machine: type[CacheMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("WARMFRONT_TEST_EXAMPLES", "60")),
            stateful_step_count=80,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
