"""`python -m baton.cli`: the `baton` command where it is not installed as a script."""

import sys

from baton.cli.main import main

sys.exit(main())
