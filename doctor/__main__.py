"""`python -m doctor`: the same as `grpo-doctor`."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (a bare clone meets any Python, and must say so in one line)
    sys.stderr.write("grpo-doctor: error: it needs Python 3.11 or newer, this is {}.{}\n".format(*sys.version_info))
    sys.exit(3)

from doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
