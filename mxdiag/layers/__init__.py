"""From a name in a checkpoint to what it multiplies, and what is fused with it. No torch.

`families` holds the names as data, `roles` reads them, `linears` decides which stored tensors are
linear weights, `fusing` which of them a serving stack keeps in one format.
"""
