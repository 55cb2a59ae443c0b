"""The index in Python: the readable specification, and the fallback without the native module.

It applies events, matches, explains and counts, under one lock; it has no snapshots and does not
show prefixes. The native core gives the same answers (`tests/index/test_backends_agree.py`).
Read first: `keys.py` (what identifies a block) and `blocks.py`, then `rank_blocks.py` (what each
event means) and `matching.py` (what a prompt hits).
"""

from kvindex.index.reference.index import Index

__all__ = ["Index"]
