"""Measurements of kvindex; see docs/benchmarks.md."""
