"""What the HTTP side must do, one test (or a small group) a number of the contract, against
HTTP."""
