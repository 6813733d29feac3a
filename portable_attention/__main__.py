"""``python -m portable_attention``: the command line."""

import sys

from portable_attention.cli import main

if __name__ == "__main__":
    sys.exit(main())
