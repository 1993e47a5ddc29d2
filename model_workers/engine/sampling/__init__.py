"""Draws tokens: from the logits of a step to the tokens of its rows (docs/use/sampling.md)."""
