"""Error budgets: what a run may cost, judged.

`load_budget` reads a budget file, `evaluate` judges a run by it, `suggest_budget` writes one that a
run meets.
"""

from mxdiag.budget.evaluate import evaluate
from mxdiag.budget.model import Budget
from mxdiag.budget.parse import load_budget
from mxdiag.budget.suggest import suggest_budget
from mxdiag.budget.verdict import Check, Finding, Fix, Verdict

__all__ = [
    "Budget",
    "Check",
    "Finding",
    "Fix",
    "Verdict",
    "evaluate",
    "load_budget",
    "suggest_budget",
]
