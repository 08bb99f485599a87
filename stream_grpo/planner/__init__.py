"""What a setting would cost: a discrete-event model of staleness and throughput, calibrated from a run; sweeps."""
