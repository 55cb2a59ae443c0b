"""The measures, one module each: `run(bench)` returns results."""
