"""A simulated learner, and the ways of choosing its problems that are compared on it."""
