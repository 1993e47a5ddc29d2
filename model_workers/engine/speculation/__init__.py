"""Speculative decoding: a small model drafts tokens, the large one verifies them in one pass (docs/engine.md)."""
