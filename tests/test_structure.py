"""The shape of the code: imports go one way, torch stays out, commands are documented."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mxdiag

PACKAGE = Path(mxdiag.__file__).parent
README = Path(__file__).parents[1] / "README.md"

#: Lowest first. A module may import from its own layer and those before it.
LAYERS = (
    ("errors",),
    ("formats", "gemms", "progress", "families", "roles"),
    ("quantize",),
    ("decomposition",),
    ("corrections",),
    ("linears", "samples"),
    ("settings", "rows", "environment"),
    ("collect",),
    ("run_schema",),
    ("run",),
    ("allocation",),
    ("injection", "recommendation", "budget", "compare"),
    ("analyze",),
    ("report",),
    ("cli", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: What must work where torch is slow to import or missing: a weights-only scan and its parts.
TORCH_FREE = (
    "mxdiag",
    "mxdiag.errors",
    "mxdiag.formats",
    "mxdiag.decomposition",
    "mxdiag.corrections",
    "mxdiag.linears",
    "mxdiag.quantize.cpu",
    "mxdiag.collect.weights",
    "mxdiag.collect.scan_checkpoint",
    "mxdiag.analyze",
    "mxdiag.run",
    "mxdiag.cli",
)


def imports(path: Path) -> set[str]:
    """Names of mxdiag's modules that a file imports when it runs, type checking aside."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mxdiag":
            module = node.module or ""
            names = [module] if module != "mxdiag" else [f"mxdiag.{a.name}" for a in node.names]
            found.update(names)
        elif isinstance(node, ast.Import):
            found.update(a.name for a in node.names if a.name.split(".")[0] == "mxdiag")
    return found


def guarded(path: Path) -> set[str]:
    """Those under `if TYPE_CHECKING`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom) and inner.module:
                    found.add(inner.module)
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_go_one_way(path):
    relative = path.relative_to(PACKAGE)
    own = relative.parts[0].removesuffix(".py")
    if own == "__init__":
        return
    assert own in LEVEL, f"{own} has no layer"
    for module in imports(path) - guarded(path):
        layer = module.split(".")[1] if "." in module else ""
        if layer in LEVEL:
            assert LEVEL[layer] <= LEVEL[own], f"{relative} imports {module} from above"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_no_torch_and_no_transformers(module):
    code = (
        f"import sys, {module}; "
        "print([m for m in ('torch', 'transformers', 'pandas') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stdout + result.stderr


def test_every_command_has_help_and_a_place_in_the_readme():
    import typer

    from mxdiag.cli import app

    command = typer.main.get_command(app)
    text = README.read_text()
    for name, sub in command.commands.items():
        assert sub.help, name
        assert f"mxdiag {name}" in text, f"README does not show mxdiag {name}"
        for parameter in sub.params:
            assert getattr(parameter, "help", None) or parameter.name == "help", (
                f"{name} {parameter.name} has no help"
            )


def test_public_names_have_docstrings():
    for name in mxdiag.__all__:
        assert name == "__version__" or getattr(mxdiag, name).__doc__, name
