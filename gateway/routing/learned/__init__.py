"""The learned router: predicts from recorded outcomes what the large model gains over the small one, in microseconds.

Learning needs scikit-learn (`training`); scoring needs numpy alone (`router`).
"""
