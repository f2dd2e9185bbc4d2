"""Faster than HF `generate`: slots of one KV cache, a bf16 copy of the policy, vLLM servers."""
