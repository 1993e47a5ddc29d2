"""Traces, metrics and logs of the processes: their names, their set-up and their exchange."""
