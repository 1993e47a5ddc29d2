"""Engines: synchronous code that computes rows step by step, independent of Triton, NATS and clocks."""
