"""The adapter of functions: an operation is work that the engine runs once per key.

- ``definition``: the operations by name
- ``steps``: the transactions and the calls of an operation
- ``results``: the JSON that is stored
- ``call``: the call of an operation
- ``deploys``: the changes of a deploy after which a key cannot continue
- ``work``: the work of a run
- ``stored``: the work of a stored key, for the completer
"""
