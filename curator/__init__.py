"""A curation service for reinforcement learning on verifiable rewards: which problem is worth sampling next."""
