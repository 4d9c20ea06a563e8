"""The folder tree is the dependency graph, and no room grows too large."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("headbank/**/*.py"), *ROOT.glob("service/**/*.py")])

MAY_IMPORT = {
    "headbank": set(),
    "headbank.types": set(),
    "headbank.errors": set(),
    "headbank.numerics": {"types", "errors", "numerics"},
    "headbank.data": {"types", "errors", "data"},
    "headbank.bank": {"types", "errors", "bank"},
    "headbank.models": {"types", "errors", "numerics", "models"},
    "headbank.rerankers": {"types", "errors", "numerics", "models", "bank", "rerankers"},
    "headbank.jobs": {"types", "errors", "numerics", "models", "bank", "rerankers", "data", "jobs"},
    "headbank.cli": {"types", "errors", "models", "bank", "rerankers", "data", "jobs", "cli", "service"},
    "service": {"", "types", "errors", "numerics", "models", "bank", "rerankers", "service"},
}
"""Room -> rooms of headbank (and `service`) that it may import; "" is the package itself."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _room(module: str) -> str:
    return "service" if module.startswith("service") else ".".join(module.split(".")[:2])


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from headbank import bank` names a room too.
            yield from (
                f"{node.module}.{a.name}" if node.module == "headbank" else str(node.module)
                for a in node.names
            )


@pytest.mark.parametrize("path", SOURCES, ids=_module)
def test_imports_follow_the_tree(path: Path) -> None:
    room = _room(_module(path))
    allowed = MAY_IMPORT[room]
    for name in _imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "service":
            assert "service" in allowed, f"{room} imports {name}"
        elif parts[0] == "headbank":
            target = parts[1] if len(parts) > 1 else ""
            assert target in allowed or target == "__version__", f"{room} imports {name}"
        elif parts[0] == "transformers":
            assert room == "headbank.models", f"{room} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=_module)
def test_numerics_are_pure(path: Path) -> None:
    if _room(_module(path)) != "headbank.numerics":
        return
    tree = ast.parse(path.read_text())
    assert not {"logging", "os", "pathlib", "io"} & {name.split(".")[0] for name in _imports(tree)}
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not {"open", "print"} & calls


@pytest.mark.parametrize("path", SOURCES, ids=_module)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # A command's signature is its table of options; the body is what must stay readable.
            first = node.body[0].lineno if path.parent.name == "cli" else node.lineno
            assert node.end_lineno is not None
            assert node.end_lineno - first < MAX_FUNCTION_LINES, f"{node.name} is too long"


@pytest.mark.parametrize(
    "package", ["headbank", "headbank.types", "headbank.errors", "headbank.cli", "service.settings"]
)
def test_light_imports_stay_light(package: str) -> None:
    code = f"import sys, {package}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"
