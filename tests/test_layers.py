"""Imports go down one order of folders, and torch's private modules live in one of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Lowest first. A folder imports from itself and from those before it, inside of functions as well.
ORDER = (
    "_torch utils errors models ir schedule hardware ops frontend rules adapt cost plans passes planner codegen "
    "compiler processes storage runtime calibrate api integrations simulate view cli"
).split()
# The folders of a folder, lowest first; the files beside them stand above.
INSIDE = {
    "planner": ("problem", "objective", "solver", "spmd", "pipeline"),
    "passes": ("canonicalize", "adapt", "distribute", "pipeline"),
    "hardware": ("profiles",),
}
TOP = ("__init__", "compiler", "errors")  # the files beside the folders
FILES = [f for folder in ("autopar", "passes", "models") for f in sorted((ROOT / folder).rglob("*.py"))]


@cache
def module_of(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("passes", "models"):
        parts = ["autopar", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file) for file in FILES}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def place(module: str) -> int:
    """Return the place of a module's folder in the order; the package itself stands above all."""
    parts = module.split(".")
    return ORDER.index(parts[1]) if len(parts) > 1 else len(ORDER)


def imports_of(file: Path, tree: ast.AST | None = None) -> list[tuple[int, str]]:
    """(line, module of autopar) of every import, or those of a part of the file."""
    module = module_of(file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(tree or tree_of(file)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            names = (f"{name}.{alias.name}" for alias in node.names)
            found += [(node.lineno, n if n in MODULES else name) for n in names]
    return [(line, name) for line, name in found if name.partition(".")[0] == "autopar"]


def test_every_folder_has_a_place():
    folders = {f.relative_to(ROOT / "autopar").parts[0].removesuffix(".py") for f in (ROOT / "autopar").rglob("*.py")}
    assert folders - set(TOP) == set(ORDER) - {"models", "passes"} - set(TOP)


def test_imports_go_down():
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in FILES
        for line, name in imports_of(file)
        if place(name) > place(module_of(file))
    ]
    assert not wrong, "\n".join(wrong)


def without_types(file: Path) -> ast.Module:
    """Return the tree of a file without the imports that only say a type."""
    body = [n for n in tree_of(file).body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    return ast.Module(body, type_ignores=[])


def floor(module: str) -> tuple[str, int] | None:
    """Return the folder that a module is in and its place inside of it, None in a folder without folders."""
    parts = module.split(".")
    if len(parts) < 2 or parts[1] not in INSIDE:
        return None
    order = INSIDE[parts[1]]
    return parts[1], order.index(parts[2]) if len(parts) > 2 and parts[2] in order else len(order)


def test_every_folder_inside_a_folder_has_a_place():
    found = {(f.parent.parent.name, f.parent.name) for f in FILES if f.parent.parent.parent in (ROOT, ROOT / "autopar")}
    found -= {("autopar", folder) for folder in ORDER}
    assert found == {(folder, inner) for folder, order in INSIDE.items() for inner in order}


def test_imports_go_down_inside_a_folder():
    """But for those that only say a type."""
    wrong = []
    for file in FILES:
        here = floor(module_of(file))
        for line, name in imports_of(file, without_types(file)) if here else ():
            there = floor(name)
            if there is not None and there[0] == here[0] and there[1] > here[1]:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, through others as well."""
    reached = {}
    for module in imports:
        seen, left = set(), [module]
        while left:
            new = imports.get(left.pop(), set()) - seen
            seen |= new
            left += new
        reached[module] = seen
    groups = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in reached if a in reached[a]}
    return sorted(map(list, groups))


def test_files_import_in_no_circle():
    """Inside of functions as well, but for those that only say a type."""
    assert not circles({module_of(f): {name for _, name in imports_of(f, without_types(f))} for f in FILES})


def test_few_files_lie_at_the_top():
    files = sorted(f.stem for f in (ROOT / "autopar").glob("*.py"))
    assert files == sorted(TOP)


def test_no_module_has_the_name_of_a_public_function():
    import autopar

    folders = {f.stem for f in (ROOT / "autopar").iterdir() if f.suffix in ("", ".py")}
    assert not folders & {name for name in autopar.__all__ if callable(getattr(autopar, name))}


def test_private_torch_stays_in_one_folder():
    wrong = []
    for file in FILES:
        if file.parent.name == "_torch":
            continue
        for node in ast.walk(tree_of(file)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            wrong += [
                f"{file.relative_to(ROOT)}:{node.lineno} {n}" for n in names if n.startswith("torch.") and "._" in n
            ]
    assert not wrong, "\n".join(wrong)


def test_files_are_short():
    long = [f"{f.relative_to(ROOT)}: {n}" for f in FILES if (n := len(f.read_text().splitlines())) > 400]
    assert not long
