"""What a fleet would have done with a trace: the real placement, index and cache under a virtual clock."""
