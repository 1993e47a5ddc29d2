"""Validation: a wire request becomes a `ValidRequest` or a typed error. Inside, the types are trusted."""
