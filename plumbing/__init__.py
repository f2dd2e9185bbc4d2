"""Helps the commands: loads questions and models, saves files and checkpoints, prints reports."""
