"""Benchmark scripts with subcommands: each is a module of this folder with `add_options(parser)` and `run(options)`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module


def run_command(description: str, commands: Mapping[str, tuple[str, str]], arguments: Sequence[str] | None) -> int:
    """Parses the command line, and runs the subcommand that it names.

    Args:
        commands: by name, the module and one line of help. Only the module that is run is imported.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in commands.items():
        documentation = import_module(f"benchmarking.{module}").__doc__ if given[:1] == [name] else None
        subparser = subparsers.add_parser(
            name, help=summary, description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if given[:1] == [name]:
            import_module(f"benchmarking.{module}").add_options(subparser)
    options = parser.parse_args(given)
    return import_module(f"benchmarking.{commands[options.command][0]}").run(options)
