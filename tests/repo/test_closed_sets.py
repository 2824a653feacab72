"""Tests that branches over the values of a Literal raise an error for any other value.

In a chain ``if x == "a": .. elif x == "b": .. else: ..``, or in consecutive ifs that leave the
block, a value added later must not run an older value's branch. Two forms are allowed: a single
branch with an else, which often means "this, or anything else", and an else for the second of only
two values.
"""

import ast

import pytest

from tests.repo.test_tree import PYTHON, name

PACKAGES = ("sbpflow", "models", "data", "planner")
OURS = [path for path in PYTHON if name(path).split("/")[0] in PACKAGES]


def _texts(node: ast.expr) -> set[str] | None:
    """Return the strings in an expression, or None if it has anything but constant strings."""
    values = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    texts = {value.value for value in values if isinstance(value, ast.Constant)}
    return texts if len(texts) == len(values) and all(isinstance(t, str) for t in texts) else None


def literals(tree: ast.AST) -> list[frozenset[str]]:
    """Return every ``Literal[...]`` of strings in a module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            if texts := _texts(node.slice):
                found.append(frozenset(texts))
    return found


def _compared(test: ast.expr) -> tuple[str, set[str]] | None:
    """Return the subject of ``x == "a"`` or ``x in ("a", "b")``, and the strings in the
    comparison."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq | ast.In):
        return None
    texts = _texts(test.comparators[0])
    return None if texts is None or len(test.ops) > 1 else (ast.unparse(test.left), texts)


def _chain(block: list[ast.stmt]) -> tuple[str, set[str], int, list[ast.stmt]] | None:
    """Return the chain at the start of a block: its subject, strings, branches, and the code for
    any other value; return None if a branch continues after the chain.
    """
    subject, texts, branches = "", set(), 0
    while block and isinstance(first := block[0], ast.If):
        compared = _compared(first.test)
        if compared is None or compared[0] != (subject or compared[0]):
            break
        subject, branches = compared[0], branches + 1
        texts |= compared[1]
        leaves = isinstance(first.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
        if not first.orelse and not leaves:
            return None
        block = first.orelse or block[1:]
    return subject, texts, branches, block


def open_chains(tree: ast.AST, closed: list[frozenset[str]]) -> list[tuple[int, str]]:
    """Return the line and the subject of each chain over a closed set that does not raise an error
    for other values.
    """
    found, seen = [], set()
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            for at in range(len(block) if isinstance(block, list) else 0):
                if block[at] in seen or (chain := _chain(block[at:])) is None:
                    continue
                seen |= {*block[at : at + chain[2]], *_elifs(block[at])}
                subject, texts, branches, rest = chain
                if branches == 1:
                    in_set = rest and any(texts < values and len(values) == 2 for values in closed)
                    raises = any(isinstance(n, ast.Raise) for x in rest for n in ast.walk(x))
                else:
                    in_set = branches and any(texts <= values for values in closed)
                    raises = rest and isinstance(rest[0], ast.Raise)
                if in_set and not raises:
                    found.append((block[at].lineno, subject))
    return found


def _elifs(node: ast.stmt) -> list[ast.stmt]:
    found = []
    while isinstance(node, ast.If) and len(node.orelse) == 1:
        found.append(node := node.orelse[0])
    return found


def _all_literals() -> list[frozenset[str]]:
    texts = [text for path in OURS if "Literal[" in (text := path.read_text(encoding="utf-8"))]
    return [literal for text in texts for literal in literals(ast.parse(text))]


def test_branches_over_a_literal_raise_for_unknown_values():
    closed = _all_literals()
    assert frozenset({"auc", "gauc", "logloss", "normalised_entropy"}) in closed
    wrong = [
        f"{name(path)}:{line}: other values of {subject} run as one of its cases"
        for path in OURS
        for line, subject in open_chains(ast.parse(path.read_text(encoding="utf-8")), closed)
    ]
    assert not wrong, "\n".join(wrong)


CHAIN = """
def f(x):
    if x == "a":
        y = 1
    elif x == "b":
        y = 2
    else:
        {other}
    return y
"""
RETURNS = """
def f(x):
    if x.name == "a":
        return 1
    if x.name in ("b", "c"):
        return 2
    {other}
"""


SINGLE = """
def f(x):
    if x == "a":
        return 1
    {other}
"""


@pytest.mark.parametrize(("other", "count"), [("return 2", 1), ("raise ValueError(x)", 0)])
def test_the_search_detects_an_else_for_the_other_of_two_values(other, count):
    tree = ast.parse(SINGLE.format(other=other))
    assert len(open_chains(tree, [frozenset("ab")])) == count
    assert not open_chains(tree, [frozenset("abc")])


@pytest.mark.parametrize("code", [CHAIN, RETURNS])
@pytest.mark.parametrize(("other", "count"), [("y = 3", 1), ("raise ValueError(x)", 0)])
def test_the_search_detects_a_chain_that_does_not_raise(code, other, count):
    closed = [frozenset("abcd")]
    assert len(open_chains(ast.parse(code.format(other=other)), closed)) == count
    assert not open_chains(ast.parse(code.format(other=other)), [frozenset("ax")])
