"""`python -m ringcomm`: runs the command."""

import sys

from ringcomm.tools.cli import main

sys.exit(main())
