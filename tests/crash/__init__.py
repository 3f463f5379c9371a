"""The crash kit on planted bugs, on correct views, on the demo and on the examples of the docs."""
