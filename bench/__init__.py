"""Benchmarks, each beside a peer in one run. `sluice bench NAME` runs bench/NAME.py."""
