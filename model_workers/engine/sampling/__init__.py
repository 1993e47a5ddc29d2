"""Draws tokens: from the logits of a step to the tokens of its sequences (docs/use/sampling.md)."""
