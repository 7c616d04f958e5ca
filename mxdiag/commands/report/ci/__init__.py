"""Verdicts in the formats that CI systems read."""
