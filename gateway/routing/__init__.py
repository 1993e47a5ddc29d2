"""Routing: chooses the model for a request. Pure code: features of a request in, a plan out."""
