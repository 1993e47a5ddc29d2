"""The safety of prompts and answers. Pure functions; nothing else of the gateway is imported."""
