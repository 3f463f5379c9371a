"""Random interleavings of clients, completers, deaths and expired locks, against a simple model of
the promise."""
