"""The law catches what it forbids, in a small tree of files that is made for it."""

import law
import pytest

FORBIDDEN = {
    "imports of a higher floor": ("kl.py", "def f():\n    import train", "kl.py:2 imports train"),
    "files in circles": ("metrics.py", "import kl", "kl, metrics"),
    "folders in circles": ("retrievers/x.py", "import engines.server", "engines, retrievers"),
    "files on no floor": ("docs/new.py", "x = 1", "docs/new.py"),
    "functions over 60 lines": ("ppo.py", "def f():" + "\n    pass" * 60, "ppo.py:1"),
}


def printed_by_law(root, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        law.main(root)
    return ended.value.code, capsys.readouterr().out


def write(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def tree(tmp_path):
    """A tree that keeps the law, if only just."""
    lawful = {
        "kl.py": '"""A docstring is not counted."""\nimport metrics',
        "metrics.py": "",
        "formats/__init__.py": '"""A folder."""',
        "formats/x.py": "",
        "engines/server.py": "",
        "engines/slots.py": "import retrievers.x",
        "retrievers/x.py": "",
        "data.py": "def f():\n    import formats.x" + "\n    pass" * 58,
        "train.py": "import kl",
        "runs/copy.py": "import lab.nowhere, train",  # not ours
    }
    write(tmp_path, lawful)
    return tmp_path


def test_a_tree_that_keeps_the_law_only_just_is_lawful(tree, capsys):
    code, printed = printed_by_law(tree, capsys)
    assert code == 0 and "error" not in printed


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_breaks_a_law_is_named_with_its_place(name, tree, capsys):
    file, text, where = FORBIDDEN[name]
    write(tree, {file: text})
    code, printed = printed_by_law(tree, capsys)
    assert code == 1
    assert f"error: {name}: {len(where.split(', '))}, at most 0 are allowed: {where}\n" in printed


def test_nodes_are_counted_without_docstrings(tmp_path):
    write(tmp_path, {"kl.py": '"""Text."""\nx = 1', "view.py": "x", "tests/test_x.py": "pass"})
    product, path, tests = list(law.figures(tmp_path))[-3:]
    limits = list(law.SUMS.values())
    assert product[1:] == (9, limits[0], ["kl.py 5", "view.py 4"])  # Module, Expr, Name, Load
    assert path[1:] == (5, limits[1], ["kl.py 5"])  # Module, Assign, Name, Store, Constant
    assert tests[1:] == (2, limits[2], ["tests/test_x.py 2"])
