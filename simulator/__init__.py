"""Discrete-event simulation of the mesh under a given load, with the batcher's own scheduler.

Nothing here waits, reads a clock or draws unseeded numbers: the same trace, policy, cost and seed
give the same results.
"""
