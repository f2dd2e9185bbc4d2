"""Faster ways to sample than HF `generate`: slots, a bf16 copy of the policy, vLLM servers."""
