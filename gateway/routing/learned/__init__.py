"""The learned router: from recorded outcomes of a small and a large model to a score in microseconds.

Learning needs scikit-learn (`training`); scoring needs numpy alone (`router`).
"""
