"""The safety layer: inspects prompts and answers. Pure functions that import nothing else of the gateway."""
