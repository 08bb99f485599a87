"""Every figure that a line of `metrics.jsonl` carries: name, unit, meaning."""
