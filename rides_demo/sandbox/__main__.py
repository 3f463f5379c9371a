"""``python -m rides_demo.sandbox`` runs the Stripe sandbox."""

from rides_demo.sandbox.server import main

main()
