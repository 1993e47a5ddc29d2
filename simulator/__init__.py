"""Discrete-event simulation of the mesh under a given load, around the batcher's own core.

Nothing here waits, reads a clock or draws unseeded: the same trace, policy, cost and seed give the same numbers.
"""
