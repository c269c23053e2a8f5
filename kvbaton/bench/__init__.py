"""Measuring: how fast bytes move between processes, and how fast an endpoint answers."""
