"""The decoder-only models a worker can run, as plain torch over a paged KV cache."""
