"""The support tasks that the two shipped tiers are trained on: generator, grader, tokenizer, training, evaluation."""
