"""What is measured of a model with errors put in, and what of it is noise."""
