"""The support tasks that the shipped tiers were trained on: generator and grader. bench/tiers trains and measures."""
