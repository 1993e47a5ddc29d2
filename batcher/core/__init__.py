"""The batcher's decisions, without I/O: time is an argument ``now``, monotonic seconds."""
