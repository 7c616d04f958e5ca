"""How long work says that it is getting on: below the command line nothing prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Hears of phases, steps and notes; this one keeps quiet."""

    @contextmanager
    def phase(self, label: str, total: int, unit: str = "") -> Iterator[None]:
        """A stretch of work of `total` steps. `unit`: `B` for bytes, else a plural."""
        yield

    def advance(self, steps: int = 1) -> None:
        """So many more steps of the phase are done."""

    def note(self, text: str) -> None:
        """Something worth one line, such as kernels being compiled."""


QUIET = Progress()
