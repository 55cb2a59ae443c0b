"""Run the command line: `python -m kvindex`."""

import sys

from kvindex.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
