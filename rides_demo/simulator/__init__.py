"""The simulator: clients book rides under faults, then the simulator checks the data."""
