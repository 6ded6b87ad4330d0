"""`python -m retreever` is the command `retreever`."""

import os
import sys

from retreever.cli import main

if __name__ == "__main__":
    code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # The process group is closed; remaining threads of torch could abort the process while Python shuts down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
