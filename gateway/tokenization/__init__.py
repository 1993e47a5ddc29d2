"""Text to tokens: tokenizer, chat template and limits of a model, from its files, without the model itself."""
