"""docs/support.md: which families convert from which formats, from the registries."""

from __future__ import annotations

from ckpt.arch import ARCHITECTURES
from ckpt.sources import FORMATS, TRAINED_ONLY

TOP = """\
# What converts

Written by `make docs` from the registries of families and formats; edit those, not this page.

A family's **proof** says what its table is held to:

- `logits`: models of the family that Megatron's own code ran were converted, and the fp32 logits
  of transformers' class on the output equal Megatron's to 1e-4 (`make test-megatron`).
- `rebuilt`: the same, but Megatron-Core 0.16.1 lacks pieces of the family, and the tests build
  them from its modules as the programs do that train the family: Gemma's norms and caps, GLM-4's
  norms, MiniMax-M2's and OLMoE's norms over all heads, the newer indexer of sparse attention
  (`tests/megatron_variants.py`). Nemotron-H's scan, whose kernels need a GPU, is a plain
  recurrence, which is held to Megatron's own step for one token (`tests/test_megatron_mamba.py`).
  BLOOM's original is the code that trained it, BigScience's
  Megatron-DeepSpeed, written again rank by rank (`tests/test_bloom.py`); its own layers, run once
  on the CPU with plain linears and norms, gave the same to 1e-6.
- `shapes`: no Megatron code at hand runs the family on a CPU. Names, shapes and the number of
  parameters equal those of transformers' class built from the written `config.json`.

`yes` in a format's column means: tiny checkpoints of the family in that format, over tensor,
pipeline, virtual pipeline, expert and expert tensor parallel ranks of many sizes, convert bit for
bit to what slow independent code makes of them (`tests/test_every_layout.py`, in `make test`).
`no` means that the programs which write the format do not train the family.

Whatever the table says, a checkpoint converts only when every tensor has its place and no training
argument changes the network in a way that the family's class lacks. Otherwise nothing is written,
and the message names the tensor or the argument.
"""


def render() -> str:
    """The whole page."""
    head = ["family", "Hugging Face class", "also called", "proof", *(f"`{f}`" for f in FORMATS)]
    lines = [TOP, f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for item in ARCHITECTURES.values():
        cells = [f"`{item.name}`", f"`{item.model_class}`", ", ".join(item.aliases), item.proof]
        cells += ["yes" if is_trained(item.name, name) else "no" for name in FORMATS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def is_trained(family: str, format_: str) -> bool:
    """Whether a program that writes the format trains the family."""
    return family in TRAINED_ONLY.get(format_, ARCHITECTURES)
