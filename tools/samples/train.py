"""Train the built-in samples again from scratch: `python -m tools.samples.train all --out DIR`.

Corpus, tokenizer, initial weights and order of the data follow from the seed. What remains is the
order of floating-point sums, which depends on the version of torch, the processor and `--threads`;
training amplifies it, so elsewhere the weights differ while the loss comes out alike. The shipped
weights were trained with `--threads 1`, in three to five minutes of processor time each.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mxdiag.samples import CALIBRATION, ROLLOUTS, SAMPLES
from tools.samples.corpus import calibration_texts, documents, rollout_records

EOS = "<|endoftext|>"
VOCABULARY = 1024
MAX_POSITIONS = 1024
EXPERTS_PER_TOKEN = 2
_TRAIN_SEED, _HELD_OUT_SEED = 1, 2
_TOKENIZER_DOCUMENTS = 4_000
_HELD_OUT_SEQUENCES = 32

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Optimiser settings: AdamW, linear warm-up, cosine decay to a tenth."""

    steps: int = 600
    batch: int = 4
    length: int = 512
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    balance: float = 0.02
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of one step, as a share of the peak."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class Result:
    """What training reached, in nats per token of held-out text."""

    name: str
    parameters: int
    loss: float
    unigram_entropy: float
    train_tokens: int
    seconds: float


# Every dimension is a multiple of the MX block, 32; 128 is one macro block.
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def build_model(name: str) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """The untrained float32 network of one sample."""
    if name == "dense":
        return Qwen3ForCausalLM(
            Qwen3Config(
                **_SHARED, num_hidden_layers=6, intermediate_size=384, tie_word_embeddings=True
            )
        )
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_SHARED,
            num_hidden_layers=3,
            intermediate_size=384,
            num_experts=8,
            num_experts_per_tok=EXPERTS_PER_TOKEN,
            moe_intermediate_size=128,
            norm_topk_prob=True,
            router_aux_loss_coef=0.0,
            tie_word_embeddings=False,
        )
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY tokens; digits stay single, the only special token is EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = islice(documents(_TRAIN_SEED), _TOKENIZER_DOCUMENTS)
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def token_rows(
    tokenizer: PreTrainedTokenizerFast, seed: int, rows: int, length: int
) -> torch.Tensor:
    """The corpus of one seed as token ids [rows, length], documents closed by EOS and packed."""
    corpus = documents(seed)
    ids: list[int] = []
    while len(ids) < rows * length:
        for encoding in tokenizer.backend_tokenizer.encode_batch(list(islice(corpus, 256))):
            ids += [*encoding.ids, 0]
    return torch.tensor(ids[: rows * length]).view(rows, length)


def unigram_entropy(rows: torch.Tensor) -> float:
    """Entropy of the token frequencies, in nats: the loss of the best model without context."""
    shares = torch.bincount(rows.flatten()).double() / rows.numel()
    return -torch.special.xlogy(shares, shares).sum().item()


def _optimizer(model: torch.nn.Module, schedule: Schedule) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": schedule.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95), fused=True)


def balance_loss(router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Load-balancing term of routers, each [tokens, experts]; 1 when all experts are used alike.

    experts * Σ_e (share of the assignments to e) * (mean probability of e), averaged over layers:
    Fedus, Zoph, Shazeer (2021), arXiv 2101.03961, equation 4. The term that transformers adds
    pools all layers first, which lets one layer starve an expert that another favours.
    """
    terms = []
    for logits in router_logits:
        experts = logits.shape[-1]
        chosen = logits.topk(EXPERTS_PER_TOKEN).indices.flatten()
        share = torch.bincount(chosen, minlength=experts) / chosen.numel()
        terms.append(experts * (share * logits.float().softmax(-1).mean(0)).sum())
    return torch.stack(terms).mean()


def fit(model: torch.nn.Module, rows: torch.Tensor, schedule: Schedule, log: Log) -> None:
    """Train in place, one pass over `rows` [steps * batch, length]."""
    optimizer = _optimizer(model, schedule)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.rate)
    mixture = isinstance(model, Qwen3MoeForCausalLM)
    extra = {"output_router_logits": True} if mixture else {}
    model.train()
    for step, batch in enumerate(rows.split(schedule.batch)):
        output = model(input_ids=batch, labels=batch, use_cache=False, **extra)
        loss = output.loss
        if mixture:
            loss = loss + schedule.balance * balance_loss(output.router_logits)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step + 1 == schedule.steps:
            log(f"step {step:5d}  loss {loss.item():.3f}")
    model.eval()


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """Mean next-token cross-entropy over rows [n, length] of token ids, in nats."""
    losses = [model(input_ids=batch, labels=batch).loss.float().item() for batch in rows.split(8)]
    return sum(losses) / len(losses)


def train_sample(name: str, folder: Path, schedule: Schedule, log: Log) -> Result:
    """Train one sample and write it to `folder` as a bf16 checkpoint with tokenizer and card."""
    start = time.perf_counter()
    torch.manual_seed(schedule.seed)
    tokenizer = build_tokenizer()
    rows = token_rows(tokenizer, _TRAIN_SEED, schedule.steps * schedule.batch, schedule.length)
    held_out = token_rows(tokenizer, _HELD_OUT_SEED, _HELD_OUT_SEQUENCES, schedule.length)
    model = build_model(name)
    log(f"{name}: {model.num_parameters():,} parameters, {rows.numel():,} tokens")
    fit(model, rows, schedule, log)
    model.bfloat16()
    result = Result(
        name=name,
        parameters=model.num_parameters(),
        loss=evaluate(model, held_out),
        unigram_entropy=unigram_entropy(held_out),
        train_tokens=rows.numel(),
        seconds=time.perf_counter() - start,
    )
    model.generation_config = GenerationConfig(eos_token_id=0, max_new_tokens=256)
    model.save_pretrained(folder)
    _name_experts_as_published(folder / "config.json")
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(_card(result), encoding="utf-8")
    return result


def _name_experts_as_published(config: Path) -> None:
    """Store the number of experts under the key that published Qwen3-MoE checkpoints use.

    Later versions of transformers write `num_local_experts`, which version 5.0 does not read; all
    of them read `num_experts`.
    """
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"num_local_experts"', '"num_experts"'), encoding="utf-8")


def _card(result: Result) -> str:
    """The model card."""
    return f"""# sample:{result.name}

A very small language model for demonstrations and tests of mxdiag: {result.parameters:,}
parameters in bfloat16, trained on {result.train_tokens:,} tokens of generated text (stories,
instructions, small programs, arithmetic, questions and answers). It is of no other use.

| held-out text | nats per token |
|---|---|
| this model | {result.loss:.3f} |
| unigram entropy | {result.unigram_entropy:.3f} |

Corpus, tokenizer and weights are made by `python -m tools.samples.train {result.name} --out DIR`.
"""


def write_texts(folder: Path) -> None:
    """Write the calibration text and the rollouts as JSON lines."""
    texts = [{"text": text} for text in calibration_texts()]
    for name, records in ((CALIBRATION, texts), (ROLLOUTS, rollout_records())):
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        (folder / name).write_text("".join(lines), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this script."""
    parser = argparse.ArgumentParser(prog="python -m tools.samples.train", description=__doc__)
    parser.add_argument("name", choices=[*SAMPLES, "all"], nargs="?", default="all")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--steps", type=int, default=Schedule().steps, help="training steps")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)

    def log(line: str) -> None:
        sys.stderr.write(line + "\n")

    write_texts(options.out)
    for name in SAMPLES if options.name == "all" else [options.name]:
        result = train_sample(name, options.out / name, Schedule(steps=options.steps), log)
        log(
            f"{name}: loss {result.loss:.3f} nats/token, unigram entropy "
            f"{result.unigram_entropy:.3f}, {result.seconds:.0f} s"
        )


if __name__ == "__main__":
    main()
