"""The entry point of Triton's Python backend; all code is in the model_workers package."""

from model_workers.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
