"""Data sets as people have them become Problem rows, with a report of what was refused."""
