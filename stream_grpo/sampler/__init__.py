"""The sampler: vLLM, its rollouts and its loop."""
