"""`mxdiag scan`: measure every linear layer of a model or checkpoint."""
