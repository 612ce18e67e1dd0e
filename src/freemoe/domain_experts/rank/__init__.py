"""Importance of weights without gradients (MoDE Eq. 5-6): calibration, metrics, bands."""
