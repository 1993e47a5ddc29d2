"""Model workers, loaded by Triton. One worker is one Triton model instance around one engine."""
