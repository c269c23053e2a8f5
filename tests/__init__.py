"""A package, so that Python finds it before others of this name."""
