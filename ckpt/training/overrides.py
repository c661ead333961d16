"""Training arguments that the user gives by hand."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ckpt.errors import OptionsError


def parse_overrides(texts: tuple[str, ...]) -> dict[str, Any]:
    """Training arguments given as ``NAME=VALUE``; the value is read as YAML.

    Raises OptionsError for a text without ``=``.
    """
    values = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise OptionsError("--set needs NAME=VALUE", found=text)
        values[name] = _plain_value(text, value)
    return values


def _plain_value(text: str, value: str) -> object:
    import yaml  # noqa: PLC0415 - only where an argument is given by hand

    try:
        found: object = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise OptionsError("--set needs NAME=VALUE with a value in YAML", found=text) from error
    if isinstance(found, str):
        with suppress(ValueError):  # YAML 1.1 takes 1e6 for text
            return float(found)
    return found
