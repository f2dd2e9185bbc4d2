"""Holds experiments, measurements and tools. `python -m lab.NAME` runs one; claims.py is only
imported.
"""

import sys
from collections.abc import Collection
from dataclasses import fields, replace

from errors import FlagParser, prepare_command
from settings import check_value

if sys.argv[0] == "-m":  # true while python -m lab.NAME imports this package
    prepare_command()
from flags import add_flags
from settings import Settings, check_limits


def parse_flags(
    command: str, record: type, arguments: list | None, with_settings=False, methods=(), only="eval"
) -> tuple:
    """Returns (an instance of `record`, a dict of the other arguments that were given). The flags
    are the fields of `record` and, `with_settings`, those of Settings that `only` ("eval" or
    "train") names. If there are `methods`, the positional argument `method` must be one of them.
    """
    parser = FlagParser(command, description=record.__doc__)
    if methods:
        parser.add_argument("method", choices=methods)
    add_flags(parser, record, only)
    if with_settings:
        add_flags(parser, Settings, only)
    given = vars(parser.parse_args(arguments))
    names = given.keys() & {f.name for f in fields(record)}
    options = replace(record(), **{name: given.pop(name) for name in names})
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
