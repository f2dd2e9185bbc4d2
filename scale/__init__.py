"""Saves time and memory: packed rows, LoRA, sharding. policy.py, ppo.py and update.py use it."""
