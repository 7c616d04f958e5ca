"""What takes the place of an operand: as data, as values, and in a tapped model."""
