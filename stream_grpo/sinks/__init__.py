"""Where the lines of a run's metrics go besides `metrics.jsonl`."""
