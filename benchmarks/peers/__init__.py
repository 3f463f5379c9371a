"""Alternatives to this app, one module each, in the set-up that each recommends for several
processes.

A module has ``DISTRIBUTION``, its name on PyPI, and ``VIEWS``: "plain" is one INSERT that runs
once, "ride" three of them with a call in between. The other names are present if they apply to the
peer:

- ``HELD``: for each view, a context manager that holds a key like a request that still runs;
- ``CONFLICT``: the status of a duplicate during that request, if it is not 409;
- ``MISMATCH``: the status for the same key with another body;
- ``BARE``: the same work in the peer's framework, unprotected;
- ``prepare()`` and ``close()``, which are called once in each process.
"""
