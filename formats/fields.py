"""Reads single fields of a record. An error names the field; the caller adds the file and the line.

field            a value of an expected type
id_of, task_of   what questions and predictions both have
gold_answers     one text or a list of texts -> a list
"""

from errors import InputError
from formats.records import short

TASKS = ("qa", "math", "choice", "summary")
ID_FIELDS = ("id", "_id", "idx", "question_id", "unique_id")


def field(record: dict, name: str, kind: type = str, default=None):
    """Returns record[name], which must be of type `kind`. If it is missing or blank, returns
    `default`, or raises an InputError if there is no default.
    """
    value = record.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        value = default
    if value is None:
        raise InputError(f"field {name!r} is missing or empty")
    if not isinstance(value, kind):
        raise InputError(f"field {name!r}: expected {kind.__name__}, found {short(value)}")
    return value


def id_of(record: dict, number: int | None = None) -> str:
    """Returns the id; `number`, the record's place in the file, is the id of one without."""
    value = next((record[name] for name in ID_FIELDS if name in record), number)
    if type(value) not in (int, str) or value == "":
        raise InputError(f"field 'id': expected a text or a whole number, found {short(value)}")
    return str(value)


def gold_answers(record: dict, name: str) -> list[str]:
    """Returns the answers as a list. A blank one is an error, because cover-EM finds "" in every
    prediction.
    """
    value = record.get(name)
    answers = value if isinstance(value, list) else [field(record, name)]
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise InputError(f"field {name!r}: expected texts that are not blank, found {short(value)}")
    return answers


def task_of(record: dict) -> str:
    task = field(record, "task", str, "qa")
    if task not in TASKS:
        raise InputError(f"field 'task': {short(task)} is none of {', '.join(TASKS)}")
    return task
