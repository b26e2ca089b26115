"""Counts what a reader of the package must hold in mind, and follows a parameter from call to call.

    python tests/tools/figures.py                                   # of this checkout
    python tests/tools/figures.py --root CHECKOUT trainer/build.py:build:cfg

It reads syntax trees and imports nothing. Code lines are lines without docstrings, comments and blank lines.

A function *reaches* another if it passes the value of the parameter on: by position, by keyword, through
`functools.partial`, or by a method called on the value. A constructor that stores the value in a field reaches the
methods of its class that read the field. A method is found by its class where annotations name the class. An attribute
of the value is not the value, and nothing is followed through calls of stored functions. *Calls* counts every place
that passes the value on. *Climbs* are those calls, in their order, that lead into a room further up than the call just
before: room A is further up than B if `tests/laws/test_imports.py` lets A import B, directly or through other rooms.
"""

import argparse
import ast
import io
import tokenize
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
NOT_CODE = (*LAYOUT, tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """Returns how many lines hold code: docstrings, comments and blank lines do not count."""
    found: set[int] = set()
    last = tokenize.ENCODING
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        text_alone = token.type == tokenize.STRING and last in LAYOUT and following.type == tokenize.NEWLINE
        if token.type in LAYOUT:
            last = token.type
        elif token.type not in NOT_CODE and not text_alone:
            last = token.type
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found)


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def takes_configuration(function: ast.FunctionDef) -> bool:
    """Returns whether a parameter is called `cfg` or annotated as a DictConfig."""
    return any(p.arg == "cfg" or "DictConfig" in ast.unparse(p.annotation or p) for p in parameters(function))


@dataclass(frozen=True)
class Definition:
    """A function, method or class, and where it stands."""

    module: str
    node: ast.FunctionDef | ast.ClassDef
    owner: str = ""
    """Class of a method."""

    @property
    def name(self) -> str:
        return f"{self.module}:{self.owner + '.' if self.owner else ''}{self.node.name}"

    @property
    def static(self) -> bool:
        return any(ast.unparse(line) == "staticmethod" for line in self.node.decorator_list)


@dataclass
class Walk:
    """What a value reaches, in the order of the calls."""

    reached: list[Definition] = field(default_factory=list)
    calls: list[Definition] = field(default_factory=list)
    """With a function as often as it is called."""
    seen: set[tuple[Definition, str]] = field(default_factory=set)


class Package:
    """The syntax trees of the modules below `root/stabletrain`."""

    def __init__(self, root: Path):
        self.root, folder = root, root / "stabletrain"
        files = sorted(folder.rglob("*.py"))
        self.sources = {file.relative_to(folder).as_posix(): file.read_text() for file in files}
        self.trees = {name: ast.parse(source) for name, source in self.sources.items()}
        self.nodes = [node for tree in self.trees.values() for node in ast.walk(tree)]
        self.names: dict[str, dict[str, str | Definition]] = {}
        for module, tree in self.trees.items():
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
            known = {a.asname or a.name: f"{node.module}.{a.name}" for node in imports for a in node.names}
            here = [node for node in tree.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
            self.names[module] = known | {node.name: Definition(module, node) for node in here}

    def totals(self) -> dict[str, int]:
        functions = [node for node in self.nodes if isinstance(node, FUNCTIONS)]
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        lines = [line.strip() for source in self.sources.values() for line in source.splitlines()]
        return {
            "code lines": sum(code_lines(source) for source in self.sources.values()),
            "modules": len(self.trees),
            "protocols": sum(any("Protocol" in ast.unparse(base) for base in node.bases) for node in classes),
            "functions that take cfg": sum(takes_configuration(node) for node in functions),
            "comment lines": sum(line.startswith("#") for line in lines),
        }

    def find(self, module: str, name: str) -> Definition | str | None:
        """Returns what a name of a module means: a definition, or the path of an imported module."""
        found = self.names.get(module, {}).get(name)
        if not isinstance(found, str) or not found.startswith("stabletrain."):
            return found if isinstance(found, Definition) else None
        path, _, last = found.removeprefix("stabletrain.").replace(".", "/").rpartition("/")
        if (imported := f"{path}/{last}".lstrip("/") + ".py") in self.trees:
            return imported
        return self.find(f"{path}.py" if f"{path}.py" in self.trees else f"{path}/__init__.py".lstrip("/"), last)

    def bases(self, owner: Definition) -> list[Definition]:
        """Returns a class and the classes that it inherits from."""
        found = [self.find(owner.module, ast.unparse(base)) for base in owner.node.bases]
        above = [base for base in found if isinstance(base, Definition) and base != owner]
        return [owner, *(base for one in above for base in self.bases(one))]

    def member(self, owner: Definition, name: str) -> Definition | ast.AnnAssign | None:
        """Returns a method or an annotated field of a class."""
        for base in self.bases(owner):
            for node in base.node.body:
                if isinstance(node, FUNCTIONS) and node.name == name:
                    return Definition(base.module, node, base.node.name)
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                    return node
        return None

    def annotated(self, module: str, annotation: ast.expr | None) -> Definition | None:
        """Returns the first class of the package that an annotation names."""
        found = (self.find(module, n.id) for n in ast.walk(annotation or ast.Pass()) if isinstance(n, ast.Name))
        return next((d for d in found if isinstance(d, Definition) and isinstance(d.node, ast.ClassDef)), None)

    def type_of(self, inside: Definition, node: ast.expr) -> Definition | None:
        """Returns the class of an expression, where annotations tell."""
        if isinstance(node, ast.Name):
            if node.id == "self" and inside.owner:
                found = self.find(inside.module, inside.owner)
                return found if isinstance(found, Definition) else None
            for parameter in parameters(inside.node):
                if parameter.arg == node.id:
                    return self.annotated(inside.module, parameter.annotation)
            given = [n.value for n in ast.walk(inside.node) if isinstance(n, ast.Assign) and is_named(n, node.id)]
            return self.type_of(inside, given[0]) if given and isinstance(given[0], ast.Call) else None
        if isinstance(node, ast.Attribute) and (owner := self.type_of(inside, node.value)):
            found = self.member(owner, node.attr)
            if isinstance(found, Definition):
                return self.annotated(found.module, found.node.returns)
            return self.annotated(owner.module, found.annotation) if found else None
        if isinstance(node, ast.Call) and (called := self.called(inside, node.func)):
            is_class = isinstance(called.node, ast.ClassDef)
            return called if is_class else self.annotated(called.module, called.node.returns)
        return None

    def called(self, inside: Definition, node: ast.expr) -> Definition | None:
        """Returns the function, method or class that an expression names."""
        if isinstance(node, ast.Name):
            found = self.find(inside.module, node.id)
            return found if isinstance(found, Definition) else None
        if not isinstance(node, ast.Attribute):
            return None
        named = self.find(inside.module, node.value.id) if isinstance(node.value, ast.Name) else None
        if isinstance(named, str):
            found = self.find(named, node.attr)
        else:
            owner = named or self.type_of(inside, node.value)
            found = self.member(owner, node.attr) if owner and isinstance(owner.node, ast.ClassDef) else None
        return found if isinstance(found, Definition) else None

    def follow(self, inside: Definition, value: str, walk: Walk) -> None:
        """Adds to `walk` what the expression `value` of a function reaches."""
        if (inside, value) in walk.seen:
            return
        walk.seen.add((inside, value))
        if inside not in walk.reached:
            walk.reached.append(inside)
        if isinstance(inside.node, ast.ClassDef):
            self.follow_class(inside, value, walk)
            return
        values = {value}
        for node in ast.walk(inside.node):
            if isinstance(node, ast.Assign) and passes(node.value, values):
                values |= {ast.unparse(target) for target in node.targets}
        for call in sorted((n for n in ast.walk(inside.node) if isinstance(n, ast.Call)), key=lambda n: n.lineno):
            function, given = call.func, list(call.args)
            if ast.unparse(function) in ("partial", "functools.partial") and given:
                function, given = given[0], given[1:]
            if (called := self.called(inside, function)) is None:
                continue
            names = self.names_of(called)
            handed = [n for n, a in zip(names[0], given, strict=False) if passes(a, values)]
            handed += [k.arg for k in call.keywords if k.arg in names[1] and passes(k.value, values)]
            if isinstance(function, ast.Attribute) and passes(function.value, values) and called.owner:
                handed.append("self")
            for name in handed:
                walk.calls.append(called)
                self.follow(called, name, walk)
        if inside.node.name == "__init__":
            for stored in sorted(v for v in values if v.startswith("self.")):
                self.follow_class(self.find(inside.module, inside.owner), stored.removeprefix("self."), walk)

    def follow_class(self, owner: Definition, name: str, walk: Walk) -> None:
        """Follows an argument of a constructor, or a field: to `__init__`, else to the methods that read the field."""
        made, taken = self.member(owner, "__init__"), name in self.names_of(owner)[1]
        if isinstance(made, Definition) and taken and (made, name) not in walk.seen:
            self.follow(made, name, walk)
            return
        for node in owner.node.body:
            if isinstance(node, FUNCTIONS) and node.name != "__init__" and f"self.{name}" in texts(node):
                self.follow(Definition(owner.module, node, owner.node.name), f"self.{name}", walk)

    def names_of(self, called: Definition) -> tuple[list[str], list[str]]:
        """Returns the names of the arguments that a call gives by position, and of all that it may give."""
        if isinstance(called.node, ast.ClassDef):
            if isinstance(made := self.member(called, "__init__"), Definition):
                return self.names_of(made)
            fields = [n for b in reversed(self.bases(called)) for n in b.node.body if isinstance(n, ast.AnnAssign)]
            names = list(dict.fromkeys(ast.unparse(n.target) for n in fields))
            return names, names
        own = called.node.args
        names = [p.arg for p in (*own.posonlyargs, *own.args)]
        names = names[1:] if called.owner and not called.static else names
        return names, [*names, *(p.arg for p in own.kwonlyargs)]

    @cached_property
    def below(self) -> dict[str, set[str]]:
        """Returns, for each room, those that it may import, directly or through others."""
        tree = ast.parse((self.root / "tests/laws/test_imports.py").read_text())
        tables = [
            n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in ("NOUNS", "MAY_SEE")
        ]
        known: dict = {}
        exec(compile(ast.Module(tables, []), "test_imports", "exec"), known)
        found = {room: set(seen) for room, seen in known["MAY_SEE"].items()}
        for _ in found:
            found = {room: seen.union(*(found.get(other, set()) for other in seen)) for room, seen in found.items()}
        return found

    def walk(self, start: str) -> Walk:
        """Follows `FILE:FUNCTION:PARAMETER`, such as `trainer/build.py:build:cfg`."""
        module, function, parameter = start.split(":")
        owner, _, name = function.rpartition(".")
        found = self.find(module, owner or name)
        found = self.member(found, name) if owner and isinstance(found, Definition) else found
        if not isinstance(found, Definition) or parameter not in [p.arg for p in parameters(found.node)]:
            raise SystemExit(f"{start}: no such function or parameter below {self.root}/stabletrain")
        walk = Walk()
        self.follow(found, parameter, walk)
        walk.reached.remove(found)
        return walk

    def climbs(self, start: str, walk: Walk) -> int:
        """Returns how many calls of a walk lead into a room further up than the call just before."""
        rooms = [room_of(start), *(room_of(called.module) for called in walk.calls)]
        return sum(last in self.below.get(room, set()) for last, room in pairwise(rooms))


def room_of(module: str) -> str:
    return module.split(":")[0].split("/")[0].removesuffix(".py")


def passes(node: ast.expr, values: set[str]) -> bool:
    """Returns whether an expression is one of the values, or chooses between it and something else."""
    if isinstance(node, ast.IfExp):
        return passes(node.body, values) or passes(node.orelse, values)
    if isinstance(node, ast.BoolOp):
        return any(passes(one, values) for one in node.values)
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in values


def is_named(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def texts(node: ast.AST) -> set[str]:
    return {ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the checkout to read")
    parser.add_argument("--list", action="store_true", help="also print the functions that are reached")
    parser.add_argument("starts", nargs="*", metavar="FILE:FUNCTION:PARAMETER")
    args = parser.parse_args()
    package = Package(args.root)
    for name, number in package.totals().items():
        print(f"{number:8,}  {name}")
    for start in args.starts:
        walk = package.walk(start)
        files, climbs = {found.module for found in walk.reached}, package.climbs(start, walk)
        print(f"{len(walk.reached):8,}  functions that {start} reaches, in {len(files)} files")
        print(f"          {len(walk.calls)} calls, {climbs} climbs")
        for found in walk.reached if args.list else ():
            print(f"            {found.name}")


if __name__ == "__main__":
    main()
