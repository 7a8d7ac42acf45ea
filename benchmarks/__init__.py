"""Measurements: each module here writes results/NAME.json and results/NAME.png."""
