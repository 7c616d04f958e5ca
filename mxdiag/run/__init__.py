"""A run: its rows, and the folder that holds it."""
