"""What the batcher decides, without I/O: time is an argument ``now``, monotonic seconds."""
