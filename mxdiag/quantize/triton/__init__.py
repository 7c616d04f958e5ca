"""MXFP4 on a GPU: Triton kernels. `launch` is the way in."""
