"""Generated code of the public API (protos/sluice/v1)."""
