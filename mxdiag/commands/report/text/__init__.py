"""What the commands print on a terminal or into a pipe."""
