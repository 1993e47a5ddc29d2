"""Connections of a batcher to its workers, over Triton's gRPC protocol."""
