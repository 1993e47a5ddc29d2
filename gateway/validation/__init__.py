"""Validation: a wire request becomes a `ValidRequest` or a typed error. Nothing behind it checks again."""
