"""Faster ways to sample than `generate`: slots, a bf16 copy of the policy, vLLM servers."""
