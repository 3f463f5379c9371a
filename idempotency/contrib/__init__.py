"""One module for each framework. A project imports only the modules that it uses."""
