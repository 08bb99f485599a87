"""What `bench_staleness` has besides cells of an imposed age: runs of a `max_policy_age`, and the picture of both."""
