"""What the benchmarks share: their page, and peak memory by process."""
