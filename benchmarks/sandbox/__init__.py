"""The sandbox of generated programs, attacked."""
