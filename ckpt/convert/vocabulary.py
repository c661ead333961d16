"""How many rows of the embedding are tokens, and how many only fill it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.errors import OptionsError

if TYPE_CHECKING:
    from ckpt.config import ConvertOptions
    from ckpt.convert.hf_files import Tokenizer
    from ckpt.convert.reference import Reference
    from ckpt.training import TrainingArgs


def find_vocabulary(
    args: TrainingArgs,
    options: ConvertOptions,
    tokenizer: Tokenizer | None,
    reference: Reference | None,
) -> tuple[int, str | None]:
    """The true vocabulary size, and where it was found; never a guess.

    Raises OptionsError for a size above the stored rows or below the tokenizer's highest id.
    """
    size, origin = args.padded_vocab_size, "no vocabulary size is known: padding rows are kept"
    if options.vocab_size is not None:
        size, origin = options.vocab_size, _cuts_tokens(options.vocab_size, args)
    elif reference is not None and reference.vocab_size is not None:
        size, origin = reference.vocab_size, ""
        if args.vocab_size not in {None, size}:
            origin = f"vocabulary size {size} taken from the reference, not {args.vocab_size}"
    elif args.vocab_size is not None:
        size, origin = int(args.vocab_size), ""
    elif tokenizer is not None and tokenizer.size is not None:
        size = min(tokenizer.size, args.padded_vocab_size)
        origin = f"vocabulary size {size} taken from the tokenizer"
    if size > args.padded_vocab_size:
        raise OptionsError(
            "the vocabulary is larger than the stored embedding",
            file=reference.file if reference and options.vocab_size is None else None,
            expected=f"at most {args.padded_vocab_size}",
            found=f"{size} from {_origin(options, reference)}",
        )
    highest = tokenizer.highest_id if tokenizer else None
    if highest is not None and highest >= size:
        raise OptionsError(
            "the tokenizer has ids that the model would lack",
            file=tokenizer.files[0][1].parent if tokenizer else None,
            expected=f"ids below {size}",
            found=f"id {highest}",
            hint=f"Keep more rows with --vocab-size (up to {args.padded_vocab_size}), "
            "or give the tokenizer that the model was trained with",
        )
    return size, origin or None


def _cuts_tokens(size: int, args: TrainingArgs) -> str:
    """A warning where the user's size is below that of the training arguments."""
    if args.vocab_size is None or size >= args.vocab_size:
        return ""
    return (
        f"--vocab-size {size} is below the {args.vocab_size} of the training arguments: "
        f"{args.vocab_size - size} tokens are cut off, not padding alone"
    )


def _origin(options: ConvertOptions, reference: Reference | None) -> str:
    if options.vocab_size is not None:
        return "--vocab-size"
    if reference is not None and reference.vocab_size is not None:
        return "the reference"
    return "the training arguments"
