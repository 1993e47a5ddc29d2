"""Faults of a running mesh: its processes, links, disk and clocks, and what callers see of them."""
