"""kvindex beside whole engines: a real vLLM on a CPU, with tiny models made on the spot.

`.ci/engines` installs vLLM and runs these tests; they are left out of every other run.
"""
