"""The shape of the code: imports go one way, torch stays out, commands are documented."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mxdiag
from paths import README

PACKAGE = Path(mxdiag.__file__).parent

#: Every module, lowest first. A module imports only from what stands before it, packages and the
#: modules inside them alike.
ORDER = """
errors progress formats gemms options
samples

layers             families fusing roles linears

quantize           sums sources
  .                reference
  corrections      base arithmetic mbs of mbs_of scale_mse scale_mantissa nvfp4 mxfp8 bf16
  corrections      block2d hadamard sr aqn registry evaluate
  cpu              simd lanes totals variant corrections layout measure pack strips measure_loops
  cpu              plan threads write write_loops launch
  triton           tiles measure write launch
  .                dispatch token_sums
decomposition

checkpoint         safetensors decode encodings gguf_names gguf hub pickle open tied inventory
checkpoint         stream stored
tap                experts tensor layouts observers parameters offload products substitution tap
model              calibration batches checkpoint_names live inventory loading
run                columns environment rows stored_sums schema run merge

commands
  scan             settings assemble checkpoint model source
  impact           settings
    inject         plan configurations compositions values injector
    measures       forward noise temperature backward routing depth attribution
    .              evidence session results verdict table
    per_layer      blocks journal predictors results sensitivity
    rollout        decode measures rollout
    .              command
  recommend        allocation reasons summary choose validation_plan validation
  diff             compare
  gate             budget measures verdict violation against_baseline coverage impact evaluate
  gate             positions parse suggest
  report           glossary
    html           encode
    text           tables
    .              escape summary predictions export impact_columns
    ci             junit_sarif gate
    text           diff impact layer progress
    html           impact page
    .              write
  .                env
api

cli                options output diff env gate impact merge recommend report sample scan schema
cli                show
__main__
"""


def modules_in_order() -> list[str]:
    """Dotted names below `mxdiag`, from ORDER: the indent says which package a line is in."""
    found: list[str] = []
    stack: list[tuple[int, str]] = []
    for line in ORDER.splitlines():
        if not line.strip():
            continue
        first, *rest = line.split()
        indent = len(line) - len(line.lstrip())
        while stack and stack[-1][0] >= indent:
            stack.pop()
        package = [name for _, name in stack]
        if first != "." and PACKAGE.joinpath(*package, first).is_dir():
            stack.append((indent, first))
            package.append(first)
        elif first != ".":
            rest = [first, *rest]
        found += [".".join([*package, name]) for name in rest]
    return found


LEVEL = {name: level for level, name in enumerate(modules_in_order())}

#: What must work where torch is slow to import or missing: a weights-only scan and its parts.
TORCH_FREE = (
    "mxdiag",
    "mxdiag.errors",
    "mxdiag.formats",
    "mxdiag.decomposition",
    "mxdiag.quantize.corrections.registry",
    "mxdiag.layers.linears",
    "mxdiag.quantize.cpu.launch",
    "mxdiag.checkpoint.stream",
    "mxdiag.commands.scan.checkpoint",
    "mxdiag.api",
    "mxdiag.run.run",
    "mxdiag.cli",
)


def name_of(path: Path) -> str:
    """Dotted name below `mxdiag`; of a package's own file, the package's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE}
FILES |= {name_of(path): path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
MODULES = {name: path for name, path in FILES.items() if path.name != "__init__.py"}


def imports(path: Path) -> set[str]:
    """Modules of mxdiag that a file imports when it runs, type checking aside."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if module.split(".")[0] != "mxdiag":
            continue
        for alias in node.names:
            full = f"{module}.{alias.name}".removeprefix("mxdiag.")
            found.add(full if full in FILES else module.removeprefix("mxdiag").lstrip("."))
    return found - {""}


def test_the_order_names_every_module_once():
    listed = [name for name in modules_in_order() if name != "samples"]
    assert sorted(listed) == sorted(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_one_way(name):
    for module in imports(MODULES[name]) - {name}:
        if module in LEVEL:
            assert LEVEL[module] < LEVEL[name], f"{name} imports {module} from above"
        else:
            assert FILES[module].name == "__init__.py", module


def test_packages_hold_nothing_but_a_docstring():
    """So that importing one thing of a package does not import the others."""
    for name, path in FILES.items():
        if path.name == "__init__.py" and name not in ("samples", "cli"):
            body = ast.parse(path.read_text()).body
            assert len(body) == 1, name
            assert isinstance(body[0], ast.Expr), name


@pytest.mark.parametrize("reverse", [False, True])
def test_a_public_name_stays_what_it_is_whatever_is_imported(reverse):
    """A submodule that is imported becomes an attribute of its package: none may hide a name."""
    names = [f"mxdiag.{name}" for name in sorted(FILES, reverse=reverse) if name != "__main__"]
    code = (
        "import importlib, types, mxdiag\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "for name in mxdiag.__all__:\n"
        "    assert not isinstance(getattr(mxdiag, name), types.ModuleType), name\n"
        "    assert getattr(mxdiag, name) is getattr(mxdiag, name), name\n"
        "assert mxdiag.scan('sample:dense', weights_only=True, corrections='none').tensors\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


#: The same thing under the same name: backends share their entry points and constants, and a
#: command's function on the command line goes by the name that it has in Python.
PARALLEL = ("quantize.reference", "quantize.dispatch", "quantize.cpu.", "quantize.triton.")


def test_one_name_means_one_thing():
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else []
            targets = node.targets if isinstance(node, ast.Assign) else targets
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                names = [node.name]
            for name in names:
                if not name.startswith("_"):
                    homes.setdefault(name, []).append(module)
    twice = {
        name: modules
        for name, modules in homes.items()
        if len(modules) > 1
        and not all(module.startswith(PARALLEL) for module in modules)
        and set(modules) != {"api", f"cli.{name}"}
    }
    assert not twice


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
