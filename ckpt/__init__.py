"""Megatron training checkpoints to a checked, served Hugging Face model."""

__version__ = "0.1.0"
