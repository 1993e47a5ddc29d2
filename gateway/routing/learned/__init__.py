"""Learned routers: predict from recorded outcomes how much better the large model would answer.

`learning` trains them with scikit-learn; scoring needs numpy alone.
"""
