"""Offline learning of routers: recorded outcomes in, a `gateway.routing.learned` router out.

Needs scikit-learn.
"""
