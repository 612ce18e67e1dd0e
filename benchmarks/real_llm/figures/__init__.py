"""From finished cells to figures, tables and pictures."""
