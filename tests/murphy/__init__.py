"""Murphy's list, end to end: what can go wrong around a booking does, to the real processes of
Rocket Rides."""
