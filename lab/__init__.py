"""Holds experiments, measurements and tools. `python -m lab.NAME` runs one; claims.py is only
imported.
"""

import sys
from collections.abc import Collection
from dataclasses import fields

from errors import FlagParser, check_value, prepare_command

if sys.argv[0] == "-m":  # true while python -m lab.NAME imports this package
    prepare_command()
from settings import add_flags, check_limits, named_in


def parse_flags(
    command: str, record: type, arguments: list | None, others=(), methods=(), only="eval"
) -> tuple:
    """Returns (an instance of `record`, a dict of the other arguments that were given). The flags
    are the fields of `record` and of the records in `others`, except each field whose setting has
    an `only` (errors.setting) that differs from the argument `only`, "eval" or "train". If there
    are `methods`, the positional argument `method` must be one of them.
    """
    parser = FlagParser(command, description=record.__doc__)
    if methods:
        parser.add_argument("method", choices=methods)
    add_flags(parser, (record,), record(), only)
    add_flags(parser, others, named_in(arguments), only)
    given = vars(parser.parse_args(arguments))
    options = record(**{f.name: given.pop(f.name, f.default) for f in fields(record)})
    for f in fields(record):
        if f.metadata.get("needed") and not getattr(options, f.name):
            parser.error(f"--{f.name} is missing")
    check_limits(options)
    return options, given


def names_in(flag: str, text: str, known: Collection[str]) -> Collection[str]:
    """Splits a flag's comma-separated names and checks them; "" means all known names."""
    names = text.replace(" ", "").split(",") if text else known
    for name in names:
        check_value(flag, name, {"one_of": known})
    return names
