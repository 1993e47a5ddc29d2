"""Generated code of what crosses NATS and Triton (protos/sluice/internal/v1)."""
