"""`python -m retreever` is the `retreever` command."""

import sys

from retreever.cli import main

sys.exit(main())
