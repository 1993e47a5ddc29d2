"""The batcher: takes tasks from gateways, forms batches, sends them to model workers, carries frames to the gateways.

Decisions are in `batcher.core`, which uses neither clock nor network; the modules here do the I/O around it.
"""
