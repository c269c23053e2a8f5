"""Tensor functions: Triton kernels and, beside each, its plain torch reference."""
