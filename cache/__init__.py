"""Block hashes, block pool, eviction, events and index: plain data, no I/O."""
