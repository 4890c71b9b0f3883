"""One replica: runs the model, owns its block pool, reports its blocks."""

import os

# OpenMP threads spin at every barrier by default. Two replicas on the same cores then wait for each other's spinning:
# a decode step measured 37 ms with waiting threads asleep and 3,340 ms without. It must be set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
