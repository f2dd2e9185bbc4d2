"""Reads questions and documents in many layouts; reads and writes the files of a run."""
