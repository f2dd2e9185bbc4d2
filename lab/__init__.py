"""Holds experiments, measurements and tools. `python -m lab.NAME` runs one; claims.py is only
imported.
"""

from collections.abc import Collection

from flags import parse_flags as parse_flags  # imports errors, which must come before torch
from settings import check_value


def names_in(flag: str, text: str, known: Collection[str]) -> Collection[str]:
    """Splits a flag's comma-separated names and checks them; "" means all known names."""
    names = text.replace(" ", "").split(",") if text else known
    for name in names:
        check_value(flag, name, {"one_of": known})
    return names
