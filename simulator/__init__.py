"""What the mesh would do with a given load: a discrete-event simulation around the batcher's own core.

Nothing here waits, reads a clock or draws unseeded: the same trace, policy, cost and seed give the same numbers.
"""
