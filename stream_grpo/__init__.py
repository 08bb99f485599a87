"""An always-on, asynchronous, off-policy GRPO trainer on vLLM, DeepSpeed, Ray, Arrow and LanceDB."""
