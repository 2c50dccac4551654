"""`python -m dnnc` is the command line."""

import sys

from dnnc.cli import main

if __name__ == "__main__":
    sys.exit(main())
