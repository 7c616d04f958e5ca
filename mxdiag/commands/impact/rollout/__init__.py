"""Texts that the quantized model writes, beside the reference's."""
