"""`python -m amem`."""

from amem.cli import main

main()
