"""Who may import whom: docs/design.md lists the layers, and a module imports from its own line or from lines above.

Every import counts, also those inside functions and under TYPE_CHECKING.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("jaxdist", "experiments")
    for path in (ROOT / package).rglob("*.py")
}


def imported(module: str, path: Path, text: str | None = None) -> Iterator[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") if text is None else text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *([base] if base else [])])
            found = {name if (name := f"{base}.{each.name}") in FILES else base for each in node.names}
            yield from (name for name in found if name in FILES)


def layers() -> list[list[str]]:
    section = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("## Layers", 1)[1]
    lines = re.search(r"```text\n(.*?)```", section, re.DOTALL)[1].splitlines()
    return [[word if word.startswith("experiments") else f"jaxdist.{word}" for word in line.split()] for line in lines]


def layer_of(module: str) -> int:
    """By the longest name in the list that the module is or is in."""
    places = {name: number for number, line in enumerate(layers()) for name in line}
    while module not in places:
        module = module.rpartition(".")[0]
        assert module, "it is in no layer"
    return places[module]


@cache
def all_imports() -> dict[str, set[str]]:
    return {module: {*imported(module, path)} - {module} for module, path in FILES.items()}


def upward(imports: dict[str, set[str]]) -> list[str]:
    place = {module: layer_of(module) for module in FILES if module != "jaxdist"}  # `jaxdist` offers what is below
    return [
        f"{module} imports {other}"
        for module in place
        for other in sorted(imports[module] & place.keys())
        if place[other] > place[module]
    ]


def test_no_module_imports_from_a_layer_above():
    assert not upward(all_imports())
    assert {name for line in layers() for name in line} <= FILES.keys()


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter(all_imports()).prepare()  # raises CycleError, which names them


@pytest.mark.parametrize("line", ["import jaxdist.config", "def f():\n    from jaxdist import config"])
def test_an_import_from_above_is_found_wherever_it_stands(line):
    path = FILES["jaxdist.layout"]
    found = {*imported("jaxdist.layout", path, path.read_text(encoding="utf-8") + line)}
    assert upward(all_imports() | {"jaxdist.layout": found}) == ["jaxdist.layout imports jaxdist.config"]


def test_functions_that_others_call_in_parallel_say_what_they_take_and_give():
    """Every public function of jaxdist.parallel, but those of `recompute`, which its executor alone calls."""
    bare = []
    for path in sorted((ROOT / "jaxdist/parallel").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and path.stem != "recompute":
                args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if node.returns is None or any(arg.annotation is None for arg in args):
                    bare.append(f"{path.name}: {node.name}")
    assert not bare
