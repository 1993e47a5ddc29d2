"""Engines: plain synchronous code that computes rows step by step. Nothing here knows Triton, NATS or a clock."""
