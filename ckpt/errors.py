"""Every error that a user can mend, as one tree.

CkptError
├── OptionsError         an option, a pipeline file or a combination of both is wrong
├── SourceError          a checkpoint cannot be read as what it claims to be
│   ├── StoreError           an object store refused, or did not answer
│   └── UnsafePickleError    a pickle asks for code that no checkpoint needs
├── FamilyError          no architecture fits the checkpoint, or the chosen one does not
├── PlanError            tensors are missing, unknown, overlapping or of the wrong shape
├── OutputError          the output directory cannot be written or is not what was written
├── ModelError           a Hugging Face directory is incomplete or contradicts itself
├── ValidationError      the check could not be made (a failed check is a verdict, not an error)
├── EngineError          an engine environment is missing, unusable or could not be installed
└── ServeError           a server did not start, did not answer or answered wrongly

Exit codes: 1 for all of these, 2 for wrong usage, 3 for a bug of ours, 130 when interrupted.
"""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_BUG = 3
EXIT_INTERRUPTED = 130


def extra_hint(extra: str) -> str:
    """How one of this distribution's extras is installed, from an index or from a clone."""
    return (
        f"pip install 'megatron-to-vllm[{extra}]', or in a clone of ckpt: pip install '.[{extra}]'"
    )


class CkptError(Exception):
    """A fault that the user can mend, with its facts in fields.

    ``file``, ``tensor``, ``expected`` and ``found`` are optional; ``hint`` is the next step.
    ``str()`` gives everything on one line.
    """

    def __init__(
        self,
        message: str,
        *,
        file: object = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        """Keep the facts; ``message`` says what is wrong without repeating them."""
        super().__init__(message)
        self.message = message
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        """Everything on one line: where, what, expected and found, and the next step."""
        where = ": ".join(part for part in (self.file, self.tensor) if part)
        text = f"{where}: {self.message}" if where else self.message
        sides = (("expected", self.expected), ("found", self.found))
        told = [f"{side} {value}" for side, value in sides if value is not None]
        if told:
            text += f" ({', '.join(told)})"
        if self.hint:
            text += f". {self.hint}"
        return " ".join(text.split("\n"))

    def facts(self) -> dict[str, str]:
        """The fields that are set, for ``--json``."""
        pairs = {
            "error": type(self).__name__,
            "message": self.message,
            "file": self.file,
            "tensor": self.tensor,
            "expected": self.expected,
            "found": self.found,
            "hint": self.hint,
        }
        return {key: str(value) for key, value in pairs.items() if value is not None}


class OptionsError(CkptError):
    """An option, a pipeline file or a combination of both is wrong."""


class SourceError(CkptError):
    """A checkpoint cannot be read as what it claims to be."""


class StoreError(SourceError):
    """An object store refused, or did not answer."""


class UnsafePickleError(SourceError):
    """A pickle asks for code that no checkpoint needs."""


class FamilyError(CkptError):
    """No architecture fits the checkpoint, or the chosen one does not."""


class PlanError(CkptError):
    """Tensors are missing, unknown, overlapping or of the wrong shape."""


class OutputError(CkptError):
    """The output directory cannot be written, or is not what was written."""


class ModelError(CkptError):
    """A Hugging Face directory is incomplete or contradicts itself."""


class ValidationError(CkptError):
    """A validation could not be made."""


class EngineError(CkptError):
    """An engine environment is missing, unusable or could not be installed."""


class ServeError(CkptError):
    """A server did not start, did not answer or answered wrongly."""
