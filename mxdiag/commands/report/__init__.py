"""What people and programs read: HTML, terminal text, and the formats of CI systems."""
