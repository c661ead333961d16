"""Time `ckpt convert` beside `cp` of the same bytes and a naive load-concatenate-save.

All three run in turn, on the same disk, in processes of their own; each run ends when its
files are flushed to the disk. The ratios say more than the seconds, which depend on the
machine. Nothing here fails for being slow: it fails only when the two conversions differ.

    python benchmarks/bench_convert.py --size 1GB --rounds 3
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt.config import parse_size

TP = 4
HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCAB = 2048, 5632, 32, 8, 64, 32000
QKV_ROWS = (HEADS + 2 * GROUPS) * HEAD_DIM
LAYER = "decoder.layers.{}."
# What the naive conversion does with each tensor: names inside a layer, by Megatron's.
PLAIN = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
# Starts a command from a small process and prints its peak memory: a process started from
# a large one would be charged with the memory of that.
LAUNCH = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
sys.exit(status != 0)
"""
OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def write_checkpoint(directory: Path, size: int) -> int:
    """A Llama checkpoint of about ``size`` bytes in TP4 files; its number of layers."""
    layer_bytes = 2 * (QKV_ROWS * HIDDEN + HIDDEN * HIDDEN + 3 * FFN * HIDDEN)
    layers = max(1, (size - 4 * VOCAB * HIDDEN) // layer_bytes)
    args = argparse.Namespace(
        num_layers=layers, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        group_query_attention=True, num_query_groups=GROUPS, kv_channels=HEAD_DIM,
        max_position_embeddings=4096, seq_length=4096, vocab_size=VOCAB, swiglu=True,
        normalization="RMSNorm", norm_epsilon=1e-5, add_bias_linear=False, rotary_base=10000,
        position_embedding_type="rope", untie_embeddings_and_output_weights=True,
        params_dtype=torch.bfloat16, padded_vocab_size=VOCAB, tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=1,
    )  # fmt: skip
    for rank in range(TP):
        file = directory / "iter_0000001" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.manual_seed(rank)
        state = {"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": _shard(layers)}
        torch.save(state, file)
    (directory / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
    return layers


def _shard(layers: int) -> dict[str, torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        bits = torch.randint(2**14, shape, dtype=torch.int16)  # of finite values
        return bits.view(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    shard = {name: random(VOCAB // TP, HIDDEN) for name in OUTSIDE if "norm" not in name}
    shard["decoder.final_layernorm.weight"] = ones.clone()
    for index in range(layers):
        prefix = LAYER.format(index)
        shard[f"{prefix}self_attention.linear_qkv.layer_norm_weight"] = ones.clone()
        shard[f"{prefix}self_attention.linear_qkv.weight"] = random(QKV_ROWS // TP, HIDDEN)
        shard[f"{prefix}self_attention.linear_proj.weight"] = random(HIDDEN, HIDDEN // TP)
        shard[f"{prefix}mlp.linear_fc1.layer_norm_weight"] = ones.clone()
        shard[f"{prefix}mlp.linear_fc1.weight"] = random(2 * FFN // TP, HIDDEN)
        shard[f"{prefix}mlp.linear_fc2.weight"] = random(HIDDEN, FFN // TP)
    return shard


def convert_naively(source: Path, output: Path) -> None:
    """What most scripts do: load every rank, concatenate, save once."""
    files = sorted(source.glob("iter_*/mp_rank_*/model_optim_rng.pt"))
    ranks = [torch.load(file, weights_only=False) for file in files]
    args, shards = ranks[0]["args"], [rank["model"] for rank in ranks]
    merged = {new: _join(old, shards) for old, new in OUTSIDE.items()}
    for index in range(args.num_layers):
        here, there = LAYER.format(index), f"model.layers.{index}."
        for old, new in PLAIN.items():
            merged[there + new] = _join(here + old, shards)
        qkv = _join(f"{here}self_attention.linear_qkv.weight", shards)
        parts = [HEADS // GROUPS * HEAD_DIM, HEAD_DIM, HEAD_DIM]
        for name, part in zip("qkv", torch.split(_grouped(qkv), parts, dim=1), strict=True):
            merged[f"{there}self_attn.{name}_proj.weight"] = part.reshape(-1, HIDDEN)
        halves = [shard[f"{here}mlp.linear_fc1.weight"].chunk(2) for shard in shards]
        merged[f"{there}mlp.gate_proj.weight"] = torch.cat([half[0] for half in halves])
        merged[f"{there}mlp.up_proj.weight"] = torch.cat([half[1] for half in halves])
    output.mkdir()
    save_file(merged, output / "model.safetensors")


def _grouped(qkv: torch.Tensor) -> torch.Tensor:
    return qkv.view(GROUPS, -1, HIDDEN)


def _join(name: str, shards: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    if "norm" in name:
        return shards[0][name]
    columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    return torch.cat([shard[name] for shard in shards], dim=1 if columns else 0)


@dataclass(frozen=True)
class Run:
    """One measured process."""

    seconds: float
    peak_bytes: int


def measure(command: list[str], output: Path) -> Run:
    """Run a command that writes ``output``, until what it wrote is on the disk."""
    shutil.rmtree(output, ignore_errors=True)
    os.sync()
    started = time.monotonic()
    launch = [sys.executable, "-I", "-S", "-c", LAUNCH, *command]
    peak = subprocess.run(launch, check=True, stdout=subprocess.PIPE, text=True).stdout
    for file in output.rglob("*"):
        _flush(file)
    return Run(time.monotonic() - started, int(peak))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two model directories hold the same tensors, bit for bit."""
    with safe_open(other / "model.safetensors", "pt") as right:
        names, seen = set(right.keys()), set()
        for file in sorted(one.glob("model*.safetensors")):
            with safe_open(file, "pt") as left:
                for name in left.keys():  # noqa: SIM118 - not a dict
                    pair = left.get_tensor(name), right.get_tensor(name)
                    if not torch.equal(*(tensor.view(torch.int16) for tensor in pair)):
                        return False
                    seen.add(name)
    return names == seen


def compare(directory: Path, size: int, rounds: int) -> None:
    """Measure the three in turn and print one line each."""
    source, script = directory / "source", str(Path(__file__).resolve())
    layers = write_checkpoint(source, size)
    stored = sum(file.stat().st_size for file in source.rglob("*.pt"))
    print(f"Llama, {layers} layers, TP{TP}, bf16, {stored / 1e9:.2f} GB, best of {rounds}")
    outputs = {name: directory / name for name in ("cp", "ckpt", "naive")}
    commands = {
        "cp": ["cp", "-r", str(source), str(outputs["cp"])],
        "ckpt": [
            sys.executable, "-m", "ckpt", "convert", str(source), str(outputs["ckpt"]), "--quiet",
        ],
        "naive": [sys.executable, script, "--naive", str(source), str(outputs["naive"])],
    }  # fmt: skip
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            runs[name].append(measure(command, outputs[name]))
    if not same_tensors(outputs["ckpt"], outputs["naive"]):
        sys.exit("the two conversions differ")
    report(runs, stored)


def report(runs: dict[str, list[Run]], stored: int) -> None:
    """Seconds, ratio to cp, speed and peak memory of each contestant."""
    base = min(run.seconds for run in runs["cp"])
    print(f"{'':8}{'best s':>8}{'median s':>10}{'x cp':>7}{'MB/s':>8}{'peak MiB':>10}")
    for name, measured in runs.items():
        seconds = [run.seconds for run in measured]
        best, peak = min(seconds), max(run.peak_bytes for run in measured)
        print(
            f"{name:8}{best:8.2f}{statistics.median(seconds):10.2f}{best / base:7.2f}"
            f"{stored / best / 1e6:8.0f}{peak / 2**20:10.0f}"
        )
    print("ckpt and the naive conversion gave the same tensors, bit for bit")


def parse(arguments: list[str]) -> Any:  # noqa: ANN401 - argparse's namespace
    """The script's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=parse_size, default="1GB", help="of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    parser.add_argument("--directory", type=Path, help="where the files are written")
    parser.add_argument("--naive", nargs=2, type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Compare, or be the naive contestant."""
    options = parse(sys.argv[1:])
    if options.naive:
        convert_naively(*options.naive)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        compare(Path(directory), options.size, options.rounds)


if __name__ == "__main__":
    main()
