"""Clients of the model workers: one channel each, one stream per batch."""
