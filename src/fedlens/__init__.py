"""Federated learning under the lens of task arithmetic."""

from importlib.metadata import version

__version__ = version("fedlens")
