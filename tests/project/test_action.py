"""The GitHub Action and the pre-commit hook, checked by public schemas."""

from __future__ import annotations

import json
import re
from importlib import resources

import jsonschema
import yaml

from paths import ROOT


def _yaml(name: str) -> dict[str, object]:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_action_is_valid_and_takes_no_input_into_its_scripts() -> None:
    folder = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "github-actions.json").read_text(encoding="utf-8"))
    action = _yaml("action.yml")
    jsonschema.validators.validator_for(schema)(schema).validate(action)
    steps = action["runs"]["steps"]  # type: ignore[index]
    scripts = "\n".join(step.get("run", "") for step in steps)
    assert "mxdiag scan" in scripts
    assert "mxdiag gate" in scripts
    # An expression inside a script would let an input's text run as a command.
    assert "${{" not in scripts
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(action["inputs"])  # type: ignore[arg-type]


def test_the_hook_is_valid() -> None:
    from pre_commit.clientlib import load_manifest

    (hook,) = load_manifest(str(ROOT / ".pre-commit-hooks.yaml"))
    assert hook["entry"] == "mxdiag gate"
    assert not hook["pass_filenames"]
    for path in ("reports/m/run.json", "budget.toml", "ci/my-budget-strict.toml"):
        assert re.search(hook["files"], path)
    assert not re.search(hook["files"], "pyproject.toml")
