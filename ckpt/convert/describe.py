"""A plan as text: what is written, from which bytes, and with which steps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt.convert.steps import Cast, Combined
from ckpt.shards import header_bytes
from ckpt.terminal import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.convert.plan import Plan
    from ckpt.convert.steps import Step
    from ckpt.rectangles import Copy
    from ckpt.shards import TensorSpec


def describe_plan(plan: Plan, files: Sequence[tuple[str, Sequence[TensorSpec]]]) -> str:
    """The plan as text: every file, tensor, step and rectangle in order."""
    targets = {target.spec.name: target for target in plan.targets}
    lines = []
    for file, specs in files:
        size = len(header_bytes(specs)) + sum(spec.nbytes for spec in specs)
        lines.append(f"{file}  {plural(len(specs), 'tensor')}, {format_bytes(size)}")
        for spec in specs:
            target = targets[spec.name]
            steps = "".join(f" | {_step_text(step)}" for step in target.steps)
            lines.append(f"  {spec.name}  {spec.dtype.name} {list(spec.shape)}{steps}")
            lines += [f"    {_copy_text(copy)}" for copy in target.copies]
    return "\n".join(lines)


def _step_text(step: Step) -> str:
    if isinstance(step, Combined):
        return f"{step.how.value} of {step.count} ranks' copies"
    return f"cast to {step.to.name}" if isinstance(step, Cast) else f"add {step.amount}"


def _copy_text(copy: Copy) -> str:
    file = re.sub(r"^.*/(?=[^/]+/[^/]+$)", "", copy.file)
    turned = " transposed" if copy.transposed else ""
    return (
        f"{copy.rows} x {copy.width} bytes{turned} from {file} @{copy.source} +{copy.source_pitch}"
        f" to @{copy.target} +{copy.target_pitch}"
    )
