"""How hard each problem is for the present policy, with how sure one is of it."""
