"""`python -m treegen` is the command line."""

import sys

from treegen.cli import main

sys.exit(main())
