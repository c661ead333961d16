"""Answers of converted models, by whatever transformers is on the path.

    python transformers4_worker.py ORDER.json ANSWERS.safetensors

ORDER maps names to model directories. A model whose type this transformers does not know gets no
answer.
"""

from __future__ import annotations

import json
import sys

import torch
import transformers
from safetensors.torch import save_file


def main(order, answers):
    with open(order, encoding="utf-8") as stream:  # noqa: PTH123 - a script of few lines
        directories = json.load(stream)
    found = {
        "version": torch.tensor([int(part) for part in transformers.__version__.split(".")[:2]])
    }
    for name, directory in directories.items():
        with open(f"{directory}/config.json", encoding="utf-8") as stream:  # noqa: PTH123
            config = json.load(stream)
        if config["model_type"] not in transformers.models.auto.CONFIG_MAPPING:
            continue
        newer = int(transformers.__version__.split(".")[0]) >= 5
        plain = {"experts_implementation": "eager"} if newer else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, torch_dtype=torch.float32, attn_implementation="eager", **plain
        ).eval()
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(config["vocab_size"], (2, 41), generator=generator)
        with torch.no_grad():
            found[name] = model(ids).logits.contiguous()
    save_file(found, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
