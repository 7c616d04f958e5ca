"""A live model: loading it, what it is run on, and where each of its parameters ends."""
