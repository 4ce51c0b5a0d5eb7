"""`python -m baton.cli`: the `baton` command without an installed script."""

import sys

from baton.cli.main import main

sys.exit(main())
