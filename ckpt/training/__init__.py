"""The training arguments that fix a model's architecture, under one set of names.

Megatron stores an ``argparse.Namespace`` of several hundred fields whose names have changed
over the years. What decides the architecture is read here once; a field that is absent is
derived from the tensors' shapes where these leave no doubt, or asked for.
"""

from ckpt.training.args import TrainingArgs
from ckpt.training.overrides import lacking_arguments, parse_overrides
from ckpt.training.parse import parse_training_args, unread_arguments
from ckpt.training.yarn import yarn_scale

__all__ = [
    "TrainingArgs",
    "lacking_arguments",
    "parse_overrides",
    "parse_training_args",
    "unread_arguments",
    "yarn_scale",
]
