"""Cascades: monitor the small model's answer and escalate to the large model when it is doubtful."""
