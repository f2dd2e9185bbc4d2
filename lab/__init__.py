"""Holds experiments, measurements and tools. `python -m lab.NAME` runs one; claims.py is only
imported.
"""

import sys
from collections.abc import Collection

from errors import prepare_command
from settings import check_value

if sys.argv[0] == "-m":  # true while python -m lab.NAME imports this package
    prepare_command()
from flags import parse_flags as parse_flags


def names_in(flag: str, text: str, known: Collection[str]) -> Collection[str]:
    """Splits a flag's comma-separated names and checks them; "" means all known names."""
    names = text.replace(" ", "").split(",") if text else known
    for name in names:
        check_value(flag, name, {"one_of": known})
    return names
