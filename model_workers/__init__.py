"""Model workers, loaded by Triton. A worker is one Triton model instance around one engine."""
