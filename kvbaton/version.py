"""The version, a constant here so that kvbaton runs from a folder that is not installed."""

__version__ = "0.1.0"
