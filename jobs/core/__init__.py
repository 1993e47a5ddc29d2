"""Decisions of a job, without I/O and without a clock: time is the argument `now`, in monotonic seconds."""
