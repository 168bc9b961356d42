"""`python -m treegen` is the command line."""

from treegen.cli import main

main()
