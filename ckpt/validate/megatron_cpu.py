"""Run megatron-core in a process without a GPU; import this before anything of ``megatron``.

``install()`` changes torch in the calling process only: a ``device="cuda"`` argument means the
CPU, ``Tensor.cuda()`` is the tensor itself, streams and synchronisation do nothing, and the CUDA
random state is the CPU generator's, so that Megatron's own tracker of random states runs unchanged.
"""

from __future__ import annotations

import contextlib
import os
import types

# Megatron decorates small functions with torch.compile, which needs a compiler at run time.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_cuda(value):
    if isinstance(value, str):
        return value.split(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


def _nothing(*args, **kwargs):
    return None


class _Done:
    """A CUDA stream or event for which everything it is asked to do is done already."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # the optimizer asserts the type name of its gradients
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.to and any(_is_cuda(arg) for arg in args[1:]):
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


def _rng_state(device="cuda", *, clone=False, graph_safe=False):
    return torch.get_rng_state()


def _set_rng_state(state, device=-1, *, graph_safe=False):
    torch.set_rng_state(state)


def _on_cpu(tensor, *, as_numpy=False, record_stream=False):
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def install():
    """Switch the shim on for the rest of the process."""
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = _nothing
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = _rng_state
    cuda.set_rng_state = _set_rng_state
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing
    cuda.Stream = cuda.Event = _Done
    cuda.current_stream = lambda device=None: _Done()
    cuda.stream = lambda stream: contextlib.nullcontext()
    _CudaMeansCpu().__enter__()

    import megatron.core.tensor_parallel.random as tracker
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    tracker._get_cuda_rng_state, tracker._set_cuda_rng_state = _rng_state, _set_rng_state
    # the original leaves the split sizes as tensors where there is no GPU to copy them from
    dispatcher.maybe_move_tensor_to_cpu = _on_cpu
    _replace_grouped_gemm()


def _replace_grouped_gemm():
    """Stand in for the CUDA package that the legacy GroupedMLP multiplies with."""
    import megatron.core.transformer.moe.grouped_gemm_util as grouped

    def gmm(a, b, batch_sizes, trans_b=False):  # noqa: FBT002 - the package's signature
        parts = torch.split(a, [int(size) for size in batch_sizes])
        products = [x @ (w.t() if trans_b else w) for x, w in zip(parts, b, strict=True)]
        return torch.cat(products)

    grouped.grouped_gemm = types.SimpleNamespace()
    grouped.ops = types.SimpleNamespace(gmm=gmm)
