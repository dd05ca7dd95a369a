"""`python -m compress.cli` is the `compress` command."""

from compress.cli import main

main()
