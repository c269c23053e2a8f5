"""The version, known without an installed package: a folder on the path is enough to run."""

__version__ = "0.1.0"
