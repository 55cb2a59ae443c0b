"""Real vLLM engines behind each router, on the GPU that is there: `python -m benchmarks.gpu`."""
