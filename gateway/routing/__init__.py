"""Which model answers. Plain code: features of a request in, a plan out."""
