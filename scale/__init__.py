"""How a policy is held: packed rows, LoRA, sharded weights. policy.py, ppo.py, update.py use it."""
