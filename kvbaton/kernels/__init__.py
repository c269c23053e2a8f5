"""Tensor functions: Triton kernels, each beside its plain torch reference."""
