"""The adapter of functions: an operation is work that the engine runs once per key.

``results`` is what is stored, ``steps`` the transactions and calls, ``definition``
the operations by name, ``work`` a run for a caller, and ``stored`` a run for the completer.
"""
