"""What a prefix cache counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Counters since the start. Queries and hits are of first admissions that are not synthetic."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    """Hit tokens that came back from the host tier."""
    num_recomputed_tokens: int = 0
    """Tokens to be computed again after a preemption."""
    num_copied_tokens: int = 0
    """Hit tokens that were copied out of a block of another prefix."""
    num_lost_tokens: int = 0
    """Tokens that stood in a block of another prefix and were not worth a copy, or had no room for one."""
    num_demoted_blocks: int = 0
    """Hashes that left the device for the host tier."""
    num_evicted_blocks: int = 0
    """Hashes that left the last tier they stood in."""
    evicted_idle_s: float = 0.0
    """Summed over evicted blocks: how long nobody had used them."""
    num_collisions: int = 0
    """Blocks whose hash was that of other tokens (possible under the xxhash forms only); never reused."""
    num_requests: int = 0
    num_misses: int = 0
    """Requests that missed a full block they could have hit."""
    num_misses_at_root: int = 0
    """Of these, the ones that missed the very first block."""
    num_misses_of_evicted: int = 0
    """Of these, the ones whose first missing block had stood here and been evicted."""
