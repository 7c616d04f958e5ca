"""Settled before anything is imported: no hub access, no threads beside the tests'."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests run side by side, one on a core: more threads would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
