"""The built-in world and the tiny models that live in it."""
