"""``make fuzz``: requests that nobody would think of. The names of the modules keep them out of the
default test run."""
