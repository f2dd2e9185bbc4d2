"""Supports the commands: loads questions and models, saves files and checkpoints, and reports."""
