"""Benchmarks of transports, stores and endpoints."""
