"""Small chains and a naive cache for the tests of cache/."""

from collections.abc import Sequence

from cache.block_hash import BlockChain, HashScheme, extra_keys
from cache.events import Cleared, EventBatch, Removed, Snapshot, Stored, Tier
from cache.prefix_cache import PrefixCache

SCHEME = HashScheme("sha256_cbor", block_size=4)


def chain(tokens: Sequence[int], salt: str | None = None, scheme: HashScheme = SCHEME) -> BlockChain:
    return scheme.chain(tokens, extra_keys(len(tokens), scheme.block_size, cache_salt=salt))


def run(cache: PrefixCache, name: object, tokens: Sequence[int], now: float = 0.0, **more: object) -> int:
    """Admit, compute and free one request; returns its cached tokens."""
    admission = cache.admit(name, chain(tokens, scheme=cache.scheme), now, **more)  # type: ignore[arg-type]
    assert admission is not None
    cache.commit(name, len(tokens))
    cache.free(name, now)
    cache.check_invariants()
    return admission.num_cached_tokens


class EventLog:
    """The resident sets that a reader of all events has, by tier; any step that should not happen fails."""

    def __init__(self) -> None:
        self.tiers: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self.parents: dict[int, int] = {}
        self.seq = 0

    @property
    def resident(self) -> set[int]:
        """What is on the device."""
        return self.tiers[Tier.DEVICE]

    def read(self, batch: EventBatch | None) -> None:
        if batch is None:
            return
        assert batch.first_seq == self.seq + 1, "a gap in the numbers"
        self.seq = batch.last_seq
        for event in batch.events:
            if isinstance(event, Stored):
                parent, tier = event.parent, self.tiers[event.tier]
                for key in event.keys:
                    assert key not in tier, "stored twice"
                    assert parent == 0 or any(parent in keys for keys in self.tiers.values()), (
                        "stored before its parent"
                    )
                    tier.add(key)
                    self.parents[key] = parent
                    parent = key
            elif isinstance(event, Removed):
                for key in event.keys:
                    self.tiers[event.tier].remove(key)
            else:
                assert isinstance(event, Cleared)
                for tier in self.tiers.values():
                    tier.clear()
            # Prefix-closed between events, on the device and over both tiers, so a reader may stop after any of them.
            for keys in (self.resident, self.resident | self.tiers[Tier.HOST]):
                assert all(self.parents[key] == 0 or self.parents[key] in keys for key in keys)


def resident_of(snapshot: Snapshot, tier: Tier = Tier.DEVICE) -> set[int]:
    """The keys of a tier in a snapshot; fails where a run comes before its parent."""
    tiers: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    for run_ in snapshot.runs:
        assert run_.parent == 0 or any(run_.parent in keys for keys in tiers.values())
        assert not tiers[run_.tier] & set(run_.keys)
        tiers[run_.tier] |= set(run_.keys)
    return tiers[tier]


class CollidingScheme(HashScheme):
    """A scheme whose every block has one and the same hash: the worst an attacker could do to XXH3."""

    def __init__(self, block_size: int = 4) -> None:
        super().__init__("xxhash_cbor", block_size, "secret")
        self._digest = lambda data: b"\x07" * 16
