"""Calls of tools: what a request offers, how models write calls, and how they are found in answers."""
