"""Benchmarks. Importing kvbaton before torch has them take the products that nodes take."""

import kvbaton as kvbaton
