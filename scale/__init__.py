"""Saves time and memory in training: packed rows, LoRA, sharding."""
