"""Train and save ``examples/llama-tp2pp2`` with Megatron-Core on a CPU.

    python examples/make_example.py        # from the repository's root, about five minutes

Four ranks (tensor parallel 2, pipeline parallel 2) train a small Llama in bf16 on the
dialogues of ``text.py`` with Megatron's own optimizer, save it in the ``torch_dist`` format
without optimizer states, and record what the original answers in fp32. Needs megatron-core
0.16, psutil and tokenizers. The stand-ins that let Megatron run on a CPU are those of the tests.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests"), str(HERE)]
import megatron_worker as worker  # isort: skip - changes torch before anything of Megatron

import megatron_model as model
import torch
from megatron.core import parallel_state as groups
from megatron_families import BASE
from text import PAIRS, dialogue
from tokenizers import Tokenizer

from ckpt.validate.recorded import record_reference

STEPS, ROWS, LENGTH, PEAK_LR = 450, 6, 64, 6e-3
OUTPUT = Path("examples/llama-tp2pp2")


def make_args(vocab_size: int) -> argparse.Namespace:
    layout = argparse.Namespace(
        tp=2, pp=2, vpp=None, ep=1, etp=None, first_layers=None, layout=None
    )
    values = {
        **BASE,
        "num_layers": 4,
        "hidden_size": 96,
        "ffn_hidden_size": 192,
        "num_attention_heads": 4,
        "kv_channels": 32,
        "group_query_attention": True,
        "num_query_groups": 2,
        "vocab_size": vocab_size,
        "make_vocab_size_divisible_by": 64,
        "padded_vocab_size": model.padded_vocab_size(vocab_size, 64, 2),
        "max_position_embeddings": 256,
        "seq_length": LENGTH,
        "rotary_base": 10000,
        **model.parallel_fields(layout),
        "transformer_impl": "local",
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
        "use_distributed_optimizer": False,
        "no_save_optim": True,
        "iteration": STEPS,
        "consumed_train_samples": STEPS * ROWS,
        "train_iters": STEPS,
        "tokenizer_type": "HuggingFaceTokenizer",
        "use_mcore_models": True,
        "micro_batch_size": 1,
        "global_batch_size": ROWS,
        "lr": PEAK_LR,
        "optimizer": "adam",
        "exit_signal": signal.SIGTERM,
    }
    return argparse.Namespace(**values)


def batches(tokenizer: Tokenizer, seed: int):
    """Rows of ``LENGTH`` token ids: dialogues in random order, one after another."""
    generator = torch.Generator().manual_seed(seed)
    encoded = [tokenizer.encode(dialogue(*pair)).ids for pair in PAIRS]
    stream: list[int] = []
    while True:
        while len(stream) < ROWS * LENGTH:
            for index in torch.randperm(len(encoded), generator=generator).tolist():
                stream += encoded[index]
        # every row begins with a dialogue, as every request does
        rows = []
        for _ in range(ROWS):
            first = int(torch.randint(0, len(encoded), (1,), generator=generator))
            rows.append((encoded[first] + stream)[:LENGTH])
            stream = stream[LENGTH:]
        yield torch.tensor(rows)


def train_rank(rank, tokenizer_file, args, rendezvous):
    worker.start_rank(rank, args, rendezvous, te=False)
    torch.manual_seed(1)
    chunks = model.build(args, args.params_dtype)
    with torch.no_grad():
        model.fill(chunks)
        for name, value in chunks[0].named_parameters():
            if "norm" in name or "layer_norm" in name:
                value.fill_(1.0)
            else:
                value.mul_(0.5)
    trainer = model.Trainer(chunks, args, lr=PEAK_LR)
    source = batches(Tokenizer.from_file(tokenizer_file), seed=7)
    for step in range(STEPS):
        warm = min(1.0, (step + 1) / 20)
        lr = PEAK_LR * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        loss = trainer.step(next(source), lr=lr)
        if loss is not None and rank == args.world_size - 1 and step % 25 == 0:
            print(f"step {step} loss {loss:.3f}", flush=True)
    model.save(chunks, args, OUTPUT)
    ids = next(batches(Tokenizer.from_file(tokenizer_file), seed=11))[:4, :48]
    logits = model.exact_logits(chunks, args, ids)
    if groups.is_pipeline_last_stage():
        record_reference(
            chunks[0],
            ids,
            OUTPUT / f"iter_{STEPS:07d}",
            forward=lambda _model, _ids: logits[..., : args.vocab_size].contiguous(),
        )
    torch.distributed.barrier()


def main() -> None:
    os.chdir(HERE.parent)  # the checkpoint's index keeps the path that it was saved to
    torch.set_num_threads(1)
    tokenizer_file = "examples/tokenizer/tokenizer.json"
    args = make_args(Tokenizer.from_file(tokenizer_file).get_vocab_size())
    worker.fork_ranks(train_rank, args, tokenizer_file)


if __name__ == "__main__":
    main()
