"""The operators' tools: see, record and replay what engines publish, and find out what is wrong.

`cli/` has the commands, one module each. `doctor/` reports why nothing matches, `audit/` what
routing and caches cost.
Read first: `cli/__init__.py`, then `doctor/examine.py` and `audit/auditor.py`.
May import: every other room.
"""
