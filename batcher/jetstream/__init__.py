"""The work queue: pulls of tasks, their acknowledgement, dead letters."""
