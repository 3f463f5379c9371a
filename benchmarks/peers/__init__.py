"""What users could take instead, each in the set-up that it recommends for several processes; one short module a peer.

A module has ``DISTRIBUTION``, its name on PyPI, and ``VIEWS``: "plain" is one INSERT that runs once, "ride" three of them with
a call in between. The rest it has where the peer has it:

- ``HELD``: by view, a context manager that keeps a key as a request does which is still under way;
- ``CONFLICT``: the status that a duplicate then gets, if it is not 409;
- ``MISMATCH``: the status for the same key with another body;
- ``BARE``: the same work in the peer's framework, unprotected;
- ``prepare()`` and ``close()``, called once in each process.
"""
