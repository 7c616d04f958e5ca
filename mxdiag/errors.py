"""The exceptions that a user can cause. The command line turns any of them into exit code 2."""

from __future__ import annotations


class MxdiagError(Exception):
    """Bad input: what is wrong, where, and what to do about it, as one message.

    Parameters
    ----------
    what
        What is wrong, as a sentence without a full stop.
    where
        The file, tensor, layer or option it concerns.
    advice
        What to do about it, as a sentence without a full stop.
    """

    def __init__(self, what: str, *, where: object = None, advice: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.advice = advice
        message = what if self.where is None else f"{self.where}: {what}"
        super().__init__(message if advice is None else f"{message}. {advice}.")


class UsageError(MxdiagError):
    """An option or argument that cannot be used."""


class TensorError(MxdiagError):
    """A tensor that cannot be quantized: wrong dtype, no axis to block along."""


class CheckpointError(MxdiagError):
    """A checkpoint that cannot be read."""


class ModelError(MxdiagError):
    """A model that cannot be loaded, run or tapped."""


class CalibrationError(MxdiagError):
    """A calibration file that cannot be used."""


class RunError(MxdiagError):
    """A run folder that cannot be read or written."""


class BudgetError(MxdiagError):
    """A budget file that cannot be applied."""
