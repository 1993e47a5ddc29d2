"""The batcher: takes tasks from gateways, forms batches, sends them to workers, returns frames.

Decisions are in `batcher.core`, which uses neither clock nor network; the modules here do the I/O
around it.
"""
