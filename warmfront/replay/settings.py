"""A fleet and how it is loaded: what a replay is told, under the virtual clock and over the wire alike."""

from __future__ import annotations

from dataclasses import dataclass

IN_FLIGHT_PER_REPLICA = 4  # in a closed loop, where the caller does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A fleet and how it is loaded."""

    policy: str = "warmfront"
    num_replicas: int = 8
    kv_blocks: int  # of each replica, without the scratch block
    host_kv_blocks: int = 0  # of each replica, in host memory
    prefill_tokens_per_s: float = 40_000.0
    host_tokens_per_s: float = 400_000.0  # that come back from host memory
    decode_s: float = 0.0  # of a step that makes answers longer
    max_num_batched_tokens: int = 512  # per step
    max_num_seqs: int = 64  # computed at once
    in_flight: int | None = None  # closed loop: so many requests at once; None: 4 per replica
    speed: float | None = None  # open loop: requests come as in the trace, so many times as fast
    num_routers: int = 1  # requests go to them in turn
    event_delay_s: float = 0.001  # from a replica's step to the routers' index
    heartbeat_s: float = 0.1  # of leases, which tell LRU ages; a closed loop plays minutes of a trace in seconds
    seed: int = 0  # of ties and of random choices
