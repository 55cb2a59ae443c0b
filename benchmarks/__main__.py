"""`python -m benchmarks`: memory and load, each alone or both."""

from __future__ import annotations

import argparse

from benchmarks import load, memory
from benchmarks.environment import header


def main() -> None:
    """Run what was asked for and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("only", nargs="?", choices=["memory", "load"], help="both by default")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: shows that they run")
    parser.add_argument("--ranks", type=int, default=64, help="ranks of the load (64)")
    options = parser.parse_args()
    print(header())
    if options.only != "load":
        memory.run(20_000 if options.smoke else 2_000_000)
    if options.only != "memory":
        load.run(8 if options.smoke else options.ranks, 50 if options.smoke else 2_000)


if __name__ == "__main__":
    main()
