"""MXFP4 on the CPU in one fused pass: numba and numpy, no torch. `launch` is the way in."""
