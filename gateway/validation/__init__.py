"""Validate requests once, at the edge: each becomes a `ValidRequest` or a typed error, and is not checked again."""
