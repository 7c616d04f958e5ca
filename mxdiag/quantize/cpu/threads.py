"""Units of work over threads: the compiled loops run without the GIL."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable

#: Units a thread takes at a time: about a tenth of a millisecond of work.
_BATCH = 4
#: Fewer units are done before another thread has begun, least of all while an OpenMP pool spins.
_WORTH_SHARING = 96


def share(work: Callable[[int, int], None], units: int, threads: int | None) -> None:
    """Call work(first, last) for batches that make up range(units), on several threads.

    The calling thread works too. The first exception of any thread is raised here.
    """
    batches = itertools.count()
    errors: list[BaseException] = []

    def take() -> None:
        try:
            while not errors and (first := next(batches) * _BATCH) < units:
                work(first, min(first + _BATCH, units))
        except BaseException as error:
            errors.append(error)

    wanted = threads or (cpu_count() if units >= _WORTH_SHARING else 1)
    if wanted == 1:
        if units:
            work(0, units)
        return
    helpers = [threading.Thread(target=take) for _ in range(min(wanted, -(-units // _BATCH)) - 1)]
    for helper in helpers:
        helper.start()
    take()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def cpu_count() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
