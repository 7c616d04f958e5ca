"""MXFP4: `reference` is the truth, `cpu` and `triton_kernel` equal it, `dispatch` chooses."""
