"""`python -m moe_parity.harness` is the command `parity`."""

import sys

from moe_parity.harness.cli.commands import main

sys.exit(main())
