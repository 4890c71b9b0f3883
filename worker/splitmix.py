"""SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): random bits from counters, without a state."""

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15  # between the counters of two draws


def mix(value: int) -> int:
    """Of 64 bits 64 others, one to one; each depends on all."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
