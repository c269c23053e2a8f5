"""Benchmarks. kvbaton is imported before torch, so that they use the same products as nodes."""

import kvbaton as kvbaton
