"""Many runs of one configuration, each in a process and a folder of its own: sweeps and ablations."""
