"""The support-desk domain the two shipped tiers are trained on: tasks, graders, tokenizer, training."""
