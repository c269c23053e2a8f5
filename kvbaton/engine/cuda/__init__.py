"""The engine on a CUDA device: what differs from plain torch in one thread."""
