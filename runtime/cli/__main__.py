"""`python -m runtime.cli` is the `runtime` command."""

from runtime.cli import main

main()
