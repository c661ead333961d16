"""The quantize stage: its options live in :mod:`ckpt.config`; nothing is quantized yet."""
