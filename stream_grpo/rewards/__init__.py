"""Rewards: verifiers by name, and how they are run."""
