"""The model workers from the batcher's side: one channel each, one stream per batch."""
