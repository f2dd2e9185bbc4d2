"""Connects the commands to the method: files, checkpoints, loading and building, reports."""
