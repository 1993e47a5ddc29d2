"""Model workers: what Triton loads. One worker is one Triton model instance around one engine."""
