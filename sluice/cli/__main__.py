"""`python -m sluice.cli` is the `sluice` command."""

from sluice.cli.main import main

main()
