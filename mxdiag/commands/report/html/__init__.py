"""The HTML report: one file that loads nothing."""
