"""Compare the plain scan with what Megatron's mixer computes for one token at a time.

A program of its own, as megatron_worker.py: ``python mamba_scan.py`` prints the largest difference
between a forward pass (which calls the scan) and Megatron's own ``_ssm_decode``, which needs no
kernels where there is one group.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

warnings.filterwarnings("ignore")
from ckpt.validate import megatron_cpu  # noqa: F401 # isort: skip - before anything of Megatron

import megatron_worker as worker
import torch
from megatron_checkpoints import Layout


def main():
    torch.set_num_threads(1)
    layout = SimpleNamespace(
        **vars(Layout("nemotronh", te=True, overrides={"mamba_num_groups": 1}))
    )
    args = worker.make_args(layout)
    with tempfile.TemporaryDirectory() as place:
        worker.start_rank(0, args, str(Path(place) / "rendezvous"), te=True)
        (chunk,) = worker.model.build(args, torch.float32)
        worker.model.fill([chunk])
        mixer = chunk.decoder.layers[0].mixer.eval()
        tokens = torch.randn(33, 2, args.hidden_size, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            whole, _ = mixer(tokens)
            convolution, states = mixer.mamba_state_shapes_per_request()
            held = torch.zeros(2, *convolution), torch.zeros(2, *states)
            one_by_one = [mixer._decode(token[None], *held)[0] for token in tokens]
    print(float((whole - torch.cat(one_by_one)).abs().max()), float(whole.std()))  # noqa: T201


if __name__ == "__main__":
    main()
