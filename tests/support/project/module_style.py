"""What `make house` checks inside a module: its order, and the names in its docstrings.

In: parsed modules. Out: a line of text per fault. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterable, Iterator

# A word in backticks that can be a name of Python: `name`, `a.name`, `name()`.
_QUOTED = re.compile(r"(?<![`\w])`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`(?![`\w])")
_WORD = re.compile(r"[A-Za-z_]\w*")
_EVERYWHERE = {*dir(builtins), *sys.stdlib_module_names, "self", "cls", "py", "md"}


def misplaced(tree: ast.Module) -> Iterator[str]:
    """Find constants, loggers and `__all__` after the module's first class or function.

    A constant that is made of the module's own classes, functions or of such constants stands
    after them, because it cannot stand before.
    """
    own: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and own:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for name in _names(targets)]
            if any(name.id in own for name in _names([node])) and "__all__" not in names:
                own.update(names)
            else:
                yield f"{node.lineno}: {', '.join(names)} stands after the first class or function"


def unknown_names(tree: ast.Module, definitions: set[str]) -> Iterator[str]:
    """Find names in backticks in docstrings that neither the module nor `definitions` has."""
    docstrings = list(_docstrings(tree))
    in_docstrings = {id(constant) for constant in docstrings}
    known = {*_EVERYWHERE, *definitions}
    for node in ast.walk(tree):
        if id(node) not in in_docstrings:
            known.update(_words(node))
    for constant in docstrings:
        for quoted in _QUOTED.finditer(str(constant.value)):
            unknown = [part for part in quoted[1].split(".") if part not in known]
            if unknown:
                line = constant.lineno + str(constant.value).count("\n", 0, quoted.start())
                yield f"{line}: `{quoted[1]}` does not exist"


def definitions(trees: Iterable[ast.Module]) -> set[str]:
    """Return what a docstring of any module may name: modules' constants, classes, functions,
    attributes, and strings that are names (keys of JSON, words of an option). Names in snake_case
    count in camelCase, too, as the CRDs write them."""
    names: set[str] = set()
    for tree in trees:
        in_docstrings = {id(constant) for constant in _docstrings(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif id(node) not in in_docstrings and _WORD.fullmatch(_text(node)):
                names.add(_text(node))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef):
                for statement in node.body:
                    if isinstance(statement, ast.Assign | ast.AnnAssign):
                        names.update(name.id for name in _names([statement]) if _stored(name))
    return names | {re.sub(r"_([a-z])", lambda match: match[1].upper(), name) for name in names}


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def _text(node: ast.AST) -> str:
    """Return the text of a string constant, "" of any other node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _names(nodes: Iterable[ast.AST]) -> Iterator[ast.Name]:
    for node in nodes:
        yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the names in one node of a syntax tree, without those of the nodes in it."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.alias):
        yield from _WORD.findall(f"{node.name} {node.asname or ''}")
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from node.module.split(".")
    elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    else:
        yield from _WORD.findall(_text(node))
