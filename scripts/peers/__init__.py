"""Our off-policy maths beside that of TRL and verl, on the same random batches."""
