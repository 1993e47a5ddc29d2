"""Guard models: their prompts, how verdicts are parsed, and the actions that follow.

No I/O; the callers run the models.
"""
