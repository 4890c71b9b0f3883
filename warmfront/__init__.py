"""The front door: command line, local cluster, replay."""
