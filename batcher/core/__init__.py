"""Decisions of the batcher, without I/O. Time is an argument `now`, in monotonic seconds."""
