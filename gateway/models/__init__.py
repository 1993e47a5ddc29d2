"""The models that a gateway serves: their settings, tokenizers, chat templates and limits, without the models."""
