"""Answers on their way to callers: frames in, events out. Plain code without a clock and without I/O."""
