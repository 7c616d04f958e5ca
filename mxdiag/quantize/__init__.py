"""MXFP4: `reference` is the truth, `cpu` and `triton` equal it, `dispatch` is the door.

`corrections` holds the candidate fixes; `sums` and `token_sums` say what every backend returns.
"""
