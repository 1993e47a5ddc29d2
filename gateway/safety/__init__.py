"""What happens to prompts before a model sees them. Pure functions: text in, text and findings out."""
