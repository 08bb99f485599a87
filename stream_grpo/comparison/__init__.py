"""Finished runs held against each other on the same held-out problems, at the same number of sampled tokens."""
