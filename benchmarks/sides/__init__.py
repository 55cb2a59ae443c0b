"""The two sides of each comparison, each in a process of its own.

An adapter gives one index the shape of all of them; a task prepares one measurement with it and
repeats it when asked. `python -m benchmarks.sides NAME` serves them (see `benchmarks.process`).
"""
