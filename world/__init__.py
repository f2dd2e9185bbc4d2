"""The built-in world and the tiny models that are trained on it."""
