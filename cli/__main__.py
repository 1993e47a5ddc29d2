"""`python -m cli` is the `sluice` command."""

from cli.main import main

main()
