"""Candidate fixes: what each one is, costs and is predicted to do, and its reference quantizer."""
