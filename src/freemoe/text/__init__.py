"""Texts for calibration and training: local files, read and packed into blocks of tokens."""
