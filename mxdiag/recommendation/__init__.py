"""Corrections per layer: chosen under a target or a budget, with reasons and what they come to."""

from mxdiag.recommendation.choose import DEFAULT_TARGET_SQNR, Recommendation, recommend
from mxdiag.recommendation.fusing import FUSE_MODES, fused_group
from mxdiag.recommendation.reasons import Choice
from mxdiag.recommendation.summary import Schedule

__all__ = [
    "DEFAULT_TARGET_SQNR",
    "FUSE_MODES",
    "Choice",
    "Recommendation",
    "Schedule",
    "fused_group",
    "recommend",
]
