"""The live page of runs: what their metrics and journals say, as pictures in a browser."""
