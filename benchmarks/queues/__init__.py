"""Queues from one writer to many readers, each kind with processes of its own.

An adapter gives one kind the shape of all of them. `python -m benchmarks.queues NAME` imports it,
forks a writer and its readers, and serves what they can be told (see `benchmarks.serving`).
"""
