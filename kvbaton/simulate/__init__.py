"""The whole service on a virtual clock (``kvbaton simulate``)."""
