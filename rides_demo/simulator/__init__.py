"""The simulator: clients book rides under faults, then the data is checked."""
