"""What a cell measures: methods and their settings."""
