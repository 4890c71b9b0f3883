"""What a fleet would have done with a trace: the real placement, index, cache and scheduler under a virtual clock."""
