"""What a release freezes: the text of its migrations, and rows that its code has written.

``python -m tests.release`` writes ``frozen.json``; after the tag of its version it refuses.
``python -m tests.release TAG`` checks that the tree may be released as this tag.
"""
