"""One module for each framework; imported only by who uses it."""
