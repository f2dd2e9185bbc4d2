"""Experiments and measurements: python -m lab.NAME."""

from __future__ import annotations

from dataclasses import fields

from errors import check_value


def taken(record: type, given: dict):
    """The `record` of these flags, each within its limits; the other flags stay in `given`."""
    names = [f.name for f in fields(record) if f.name in given]
    options = record(**{name: given.pop(name) for name in names})
    for f in fields(record):
        check_value(f.name, getattr(options, f.name), f.metadata)
    return options
