"""Convert with mbridge, on a CPU: Megatron-Core loads into one rank, mbridge saves.

    PYTHONPATH=DIR python benchmarks/bench_bridge.py SOURCE OUTPUT REFERENCE

DIR is where pip put mbridge, einops and a transformers 4 (``--no-deps --target DIR``); SOURCE is of
the format ``torch_dist``, REFERENCE holds the Hugging Face model's config.json and its index of
weights, if it has one. Modules of Megatron-Core that need a GPU or TransformerEngine are replaced
as for ``ckpt validate``; none of them computes anything here. Exit code 3: the memory does not
suffice.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
from ckpt.validate import megatron_cpu  # isort: skip - before anything of Megatron

import torch
import torch.distributed as dist
from mbridge import AutoBridge
from mbridge.core.util import unwrap_model
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as groups
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from ckpt.validate import megatron_te

# Fused kernels that are there for GPUs alone.
SETTINGS = dict.fromkeys(
    (
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
    ),
    False,
)


def convert(source: Path, output: Path, reference: Path) -> None:
    """Build the model, load it, save it."""
    bridge = AutoBridge.from_pretrained(str(reference))
    bridge.set_extra_args(use_cpu_initialization=True, perform_initialization=False, **SETTINGS)
    chunks = bridge.get_model(use_cpu_initialization=True)
    model: Any = unwrap_model(chunks[0])
    wanted = model.sharded_state_dict()
    wanted = {name: value for name, value in wanted.items() if "_extra_state" not in name}
    (directory,) = source.glob("iter_*")
    state = dist_checkpointing.load({"model": wanted}, str(directory))
    model.load_state_dict(state["model"], strict=False)
    del state
    bridge.safetensor_io = bridge._get_safetensor_io(str(reference))  # noqa: SLF001 - as it does itself when it loads
    bridge.save_weights(chunks, str(output))


def main() -> None:
    """One rank, without a network."""
    megatron_cpu.install()
    megatron_te.install()
    megatron_te.install_missing(mla=False)
    with tempfile.TemporaryDirectory() as place:
        meeting = f"file://{place}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        groups.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        try:
            convert(*(Path(name) for name in sys.argv[1:4]))
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "allocate memory" in str(error):
                print(f"out of memory: {error}", file=sys.stderr)
                sys.exit(3)
            raise
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    with torch.no_grad():
        main()
