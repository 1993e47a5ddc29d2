"""Answers on their way to callers. Plain code without I/O: time is an argument, the shell around it sends and waits."""
