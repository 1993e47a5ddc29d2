"""The forward pass over a paged KV cache: chunks of token ids in, logits out."""

from model_workers.engine.forward.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
