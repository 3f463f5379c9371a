"""The Stripe sandbox: a server with the Stripe calls of the demo, and with faults."""
