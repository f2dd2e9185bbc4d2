"""Supports the commands: loads questions and models, writes files and checkpoints, reports."""
