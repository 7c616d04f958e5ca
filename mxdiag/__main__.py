"""`python -m mxdiag`."""

from mxdiag.cli import main

main()
