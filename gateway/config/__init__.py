"""Loads models, safety policies and routers from a configuration, and reloads the policies."""
