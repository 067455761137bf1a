"""Which way imports point, what files are called, and what lies at the top level."""

from __future__ import annotations

import ast
import fnmatch
import functools
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_persample"
MAY_IMPORT = {
    "__main__": {"errors", "options", "influence"},
    "errors": set(),
    "options": {"errors"},
    "torch_internals": set(),
    "gradients": {"torch_internals", "errors", "options"},
    "rules": {"torch_internals", "errors", "options", "gradients"},
    "batch_axis": {"torch_internals", "errors", "options", "gradients", "rules"},
    "capture": {"torch_internals", "errors", "options", "gradients", "rules", "batch_axis"},
    "reference": {"torch_internals", "errors", "options", "gradients", "rules", "batch_axis", "capture"},
    "tensor_form": {"torch_internals", "errors", "options", "gradients", "rules", "batch_axis", "capture"},
    "metrics": {"errors", "options"},
    "influence": {"errors", "options", "gradients"},
    "callbacks": {
        "torch_internals", "errors", "options", "gradients", "rules", "batch_axis", "capture", "reference", "metrics",
        "influence",
    },
}  # fmt: skip
FROM_OUTSIDE = {"metrics": {"torch", "torchmetrics", "matplotlib"}}  # where a part may import these only
TOP_LEVEL = {".ci", ".git", ".github", ".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"}
TOP_LEVEL |= {PACKAGE, "examples", "tests"}
FORBIDDEN_STEMS = {"common", "helper", "helpers", "misc", "util", "utils"}
LONGEST_EXAMPLE = 100
HOLD_PRIVATE_NAMES = {
    "torch_internals.py",
    "callbacks/lightning_internals.py",
}  # those of torch and Lightning, no other
# not the field's words, and what to write in their place
NOT_OUR_WORDS = {
    "told": "known, or a name", "anew": "again", "aside": "second pass", "is said": "a warning says",
    "of sizes": "of shape", "is no list": "must be a list",
}  # fmt: skip

MODULES = sorted(set((ROOT / PACKAGE).rglob("*.py")) - {ROOT / PACKAGE / "__init__.py"})
SOURCES = sorted(path for folder in (PACKAGE, "tests", "examples") for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a source; many tests here read the same ones."""
    return ast.parse(source)


def dotted(node: ast.AST) -> str:
    """An attribute of an attribute of a name as it is written, as ``ast.unparse`` gives it; "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    above = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{above}.{node.attr}" if above else ""


def imported_names(source: str, package: str) -> set[str]:
    """Every module a source imports, anywhere in it, in full; `from a import b` counts as a and as a.b."""
    names = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def wrong_imports(layer: str, source: str, package: str) -> list[str]:
    """What a source in `layer` imports and must not."""
    wrong = []
    for name in sorted(imported_names(source, package)):
        first, *rest = name.split(".")
        if first == PACKAGE:
            is_wrong = bool(rest) and rest[0] in MAY_IMPORT and rest[0] not in MAY_IMPORT[layer] | {layer}
        elif first in {"lightning", "pytorch_lightning", "lightning_fabric"}:
            is_wrong = layer != "callbacks"
        else:
            is_wrong = name.startswith("torch.nn.utils._expanded_weights")
            allowed = FROM_OUTSIDE.get(layer)
            is_wrong |= allowed is not None and first not in allowed | sys.stdlib_module_names
        if is_wrong:
            wrong.append(name)
    return wrong


def circle_of_imports(sources: dict[str, tuple[str, str]]) -> list[str]:
    """Modules that import each other in a circle, if any; `sources` are by module its package and its source."""
    imports = {
        module: imported_names(source, package) & sources.keys() - {module, package}  # (from package import module)
        for module, (package, source) in sources.items()
    }
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def identifier(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_imports_point_one_way(path):
    inside = path.relative_to(ROOT / PACKAGE)
    layer = inside.parts[0].removesuffix(".py")
    assert layer in MAY_IMPORT, f"{layer} has no line in MAY_IMPORT, which has {sorted(MAY_IMPORT)}"
    package = ".".join([PACKAGE, *inside.parts[:-1]])
    assert wrong_imports(layer, path.read_text(encoding="utf-8"), package) == []


@pytest.mark.parametrize(
    ("layer", "source", "wrong"),
    [
        ("gradients", "import lightning_persample.rules.linear", ["lightning_persample.rules.linear"]),
        ("gradients", "from ..rules import linear", ["lightning_persample.rules", "lightning_persample.rules.linear"]),
        ("gradients", "def f():\n    from lightning_persample import capture", ["lightning_persample.capture"]),
        ("capture", "import lightning as L", ["lightning"]),
        ("capture", "from lightning_persample.rules import find_rule\nfrom .record import x", []),
        ("callbacks", "import lightning as L\nfrom ..capture import expanded_weights", []),
        (
            "metrics",
            "import torch, math\nfrom torchmetrics import Metric\nfrom lightning_persample.errors import x",
            [],
        ),
        ("metrics", "import matplotlib.pyplot\nfrom lightning_persample.metrics.base import x", []),
        ("metrics", "from ..capture import x", ["lightning_persample.capture", "lightning_persample.capture.x"]),
        ("metrics", "import numpy\nimport lightning as L", ["lightning", "numpy"]),
        ("capture", "from torch.nn.utils import _expanded_weights", ["torch.nn.utils._expanded_weights"]),
    ],
)
def test_wrong_imports_are_found(layer, source, wrong):
    assert wrong_imports(layer, source, f"{PACKAGE}.{layer}") == wrong


def test_no_modules_import_each_other_in_a_circle():
    sources = {}
    for path in MODULES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = ".".join(parts[:-1])
        module = package if parts[-1] == "__init__" else ".".join(parts)
        sources[module] = package, path.read_text(encoding="utf-8")
    assert circle_of_imports(sources) == []


def test_a_circle_is_found_where_it_is_hidden():
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.one import A"
    circle = circle_of_imports({"p.one": ("p", "def f():\n    import p.two"), "p.two": ("p", hidden), "p.c": ("p", "")})
    assert set(circle) == {"p.one", "p.two"}
    assert circle_of_imports({"p.one": ("p", "import p.two"), "p.two": ("p", "import p.c"), "p.c": ("p", "")}) == []


def private_names(source: str) -> set[str]:
    """The private names of torch and Lightning that a source imports, reads by a dotted name, or writes in a text."""
    names = set(re.findall(r"\b(?:torch|trainer|lightning)[\w.]*?\._[a-zA-Z]\w*", source))
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(dotted(node))
    outside = ("torch.", "nn.", "F.", "Tensor.", "lightning.", "trainer.", "self._trainer.")
    found = {name for name in names if name.startswith(outside) and re.fullmatch(r"[\w.]+", name)}
    return {name for name in found if re.search(r"\._(?!_|trainer)", name)}


def test_private_names_of_torch_and_lightning_are_in_two_files():
    found = {path.relative_to(ROOT / PACKAGE).as_posix(): private_names(path.read_text("utf-8")) for path in MODULES}
    assert {name for name, names in found.items() if names} == HOLD_PRIVATE_NAMES, found


def test_private_attributes_of_other_packages_are_read_in_two_files():
    trees = {identifier(path): parsed(path.read_text("utf-8")) for path in MODULES}
    ours = set().union(*map(names_given, trees.values())) | {"_replace", "_getframe"}  # (a NamedTuple's, and Python's)
    held = {f"{PACKAGE}/{name}" for name in HOLD_PRIVATE_NAMES}
    found = {name: private_attributes(tree) - ours for name, tree in trees.items() if name not in held}
    assert {name: names for name, names in found.items() if names} == {}


def names_given(tree: ast.AST) -> set[str]:
    """The names that a source gives to functions, classes, variables and attributes; texts may be such names."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


def private_attributes(tree: ast.AST) -> set[str]:
    """Private attributes that a source reads of objects that are not its own; torch documents those named _saved_*."""
    read = {node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    private = [node for node in read if re.match(r"_(?!_|saved_)", node.attr)]
    return {node.attr for node in private if ast.unparse(node.value) not in {"self", "cls", "super()"}}


def test_private_attributes_are_found():
    tree = ast.parse("self._x = tensor._version + self._y + node._saved_self + layer.weight._base")
    assert private_attributes(tree) == {"_version", "_base"}
    assert "_x" in names_given(tree)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_mul([], [])",
        "from torch.utils._pytree import tree_map",
        "from torch.overrides import _pop_mode",
        "import torch._dynamo",
        "with nn.modules.dropout._DropoutNd: pass",
        "x = self._trainer.fit_loop._combined_loader",
        "x = ('torch._C', 'torch')",
    ],
)
def test_private_names_are_found(source):
    assert private_names(source)
    public = "import torch\nfrom torch.overrides import TorchFunctionMode\nself._trainer.step(torch.__version__)"
    assert private_names(public) == set()


def test_public_names_are_listed_sorted_and_are_what_a_type_checker_sees():
    import lightning_persample

    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (seen,) = [node.body for node in tree.body if isinstance(node, ast.If)]
    names = {alias.name: node.module for node in seen for alias in node.names}
    assert lightning_persample.__all__ == sorted([*names, "__version__"])
    assert set(lightning_persample.__all__) <= set(dir(lightning_persample))
    for name, module in names.items():
        assert getattr(lightning_persample, name) is getattr(importlib.import_module(module), name), name


@pytest.mark.parametrize("first", ["__main__", *sorted(MAY_IMPORT.keys() - {"__main__"})])
def test_each_part_can_be_imported_first_and_without_those_that_it_must_not_import(first):
    code = f"import sys, {PACKAGE}.{first}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    imported = {name.split(".")[1] for name in run.stdout.split() if name.startswith(f"{PACKAGE}.")}
    allowed = {first, *MAY_IMPORT[first]}.union(*map(MAY_IMPORT.get, MAY_IMPORT[first]))
    assert imported <= allowed if first != "__main__" else imported == {"__main__"}
    assert ("lightning.pytorch" in run.stdout.split()) == (first == "callbacks")
    assert first != "__main__" or "torch" not in run.stdout.split()


def test_a_name_that_is_not_there_is_an_attribute_error():
    import lightning_persample

    assert lightning_persample.influence is importlib.import_module("lightning_persample.influence")
    for name in ("PerSampleMonitor", "_private"):
        with pytest.raises(AttributeError, match=f"module 'lightning_persample' has no attribute '{name}'"):
            getattr(lightning_persample, name)


def test_files_are_named_for_what_they_hold():
    assert [path for path in SOURCES if path.stem in FORBIDDEN_STEMS] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=identifier)
def test_examples_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_EXAMPLE


def words_of_our_own(text: str) -> list[str]:
    return [word for word in NOT_OUR_WORDS if re.search(rf"(?<![a-z]){word}(?![a-z])", text, re.IGNORECASE)]


def test_words_are_those_of_the_field():
    texts = [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "examples").rglob("*.py"), ROOT / "README.md"]
    found = {identifier(path): words_of_our_own(path.read_text(encoding="utf-8")) for path in texts}
    assert {name: words for name, words in found.items() if words} == {}


def test_words_of_our_own_are_found_in_names_and_prose():
    assert words_of_our_own("self._told = 1  # and more is said\n# Anew") == ["told", "anew", "is said"]
    assert words_of_our_own("a folder of sized parts, thrown toldness") == []


def test_the_top_level_holds_nothing_but_these():
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    found = {path.name for path in ROOT.iterdir() if not any(fnmatch.fnmatch(path.name, name) for name in ignored)}
    assert found - TOP_LEVEL == set()
