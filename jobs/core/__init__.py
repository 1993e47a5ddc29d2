"""What a job does next, decided without I/O and without a clock: time is the argument ``now``, monotonic seconds."""
