"""What the commands do, a package each, named as they are. `mxdiag.api` calls them."""
