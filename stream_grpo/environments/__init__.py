"""Environments of several turns: what one is, those built in, and the processes that run them. No torch, no vLLM."""
