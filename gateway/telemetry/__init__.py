"""Spans, metrics and drift events of the gateway."""
