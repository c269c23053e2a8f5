"""The engine on CUDA devices: what differs from plain torch on a CPU."""
