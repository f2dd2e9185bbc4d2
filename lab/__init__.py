"""Experiments and measurements: python -m lab.NAME."""
