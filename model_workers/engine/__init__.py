"""Engines: synchronous code that computes sequences step by step, independent of Triton, NATS and clocks."""
