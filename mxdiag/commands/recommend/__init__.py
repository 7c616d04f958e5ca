"""`mxdiag recommend`: a correction per layer, under a target or a budget, and its validation."""
