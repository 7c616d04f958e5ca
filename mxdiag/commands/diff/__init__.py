"""`mxdiag diff`: what moved between two runs."""
