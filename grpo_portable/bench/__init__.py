"""Measurements: engines side by side, a whole step beside TRL's default, one GPU beside several."""
