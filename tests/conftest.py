"""Shared fixtures. TRITON_INTERPRET and hub access are settled here, before anything is imported."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
