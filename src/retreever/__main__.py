"""`python -m retreever` is the command `retreever`."""

import os
import sys

from retreever.cli import main

if __name__ == "__main__":
    code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Its group is closed; threads that torch leaves behind could still abort it while Python winds down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
