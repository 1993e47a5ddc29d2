"""Audio of requests: files, chunks, and texts of chunks put together. Pure functions."""
