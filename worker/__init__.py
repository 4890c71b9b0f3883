"""One replica: runs the model, owns its block pool, reports its blocks."""
