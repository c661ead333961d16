"""Who may import whom, and what starting the program costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import Model, write_legacy
from safetensors.torch import load_file

from ckpt.manifest import read_stage

ROOT = Path(__file__).parent.parent / "ckpt"
VALUES = {"errors", "tensors", "progress", "__init__"}
COMMON = VALUES | {"config", "manifest", "shards", "terminal", "storage", "unfinished"}
STAGES = ("convert", "validate", "quantize", "serve")
# A package and what it may import from the rest of ckpt; nothing is allowed back or sideways.
ALLOWED = {
    "errors": set(),
    "progress": set(),
    "tensors": {"errors"},
    # Where files lie. Its parts are imported only where a store is named.
    "storage": {"errors"},
    "config": {"errors", "storage"},
    "unfinished": {"errors", "storage"},
    "terminal": {"__init__"},
    "manifest": {"errors", "storage", "__init__"},
    "shards": {"errors", "tensors"},
    "parts": {"errors", "tensors"},
    "rectangles": {"tensors"},
    "layout": {"errors", "tensors", "parts", "rectangles"},
    "training": {"errors", "tensors"},
    "sources": VALUES | {"parts", "storage"},
    "arch": VALUES | {"layout", "training"},
    "engines": COMMON,
    # Names and shapes by transformers, in a process of its own; it knows no table and no stage.
    "metamodel": {"errors", "model_memo"},
    "model_memo": set(),
    # Used by convert before the first byte and by inspection: stages do not import each other.
    "completeness": {"errors", "metamodel", "arch", "tensors", "shards"},
    "convert": COMMON
    | {"arch", "sources", "layout", "parts", "rectangles", "training", "completeness", "metamodel"},
    "validate": COMMON | {"sources"},
    "quantize": COMMON,
    "serve": COMMON | {"engines"},
    "inspection": COMMON | {"arch", "sources", "training", "convert"},
    "model_check": COMMON | {"inspection", "completeness", "metamodel"},
    "pipeline": COMMON | {*STAGES, "engines"},
}


def imports():
    for file in sorted(ROOT.rglob("*.py")):
        owner = file.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
                if node.module == "ckpt":
                    names = [f"ckpt.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                yield file.relative_to(ROOT), owner, name


def test_imports_follow_the_arrows():
    """cli over pipeline over stages over arch and sources over values, never back or sideways."""
    wrong = []
    for file, owner, name in imports():
        parts = name.split(".")
        if parts[0] != "ckpt" or owner in {"cli", "__main__"}:
            continue
        target = parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "__init__"
        if target != owner and target not in ALLOWED[owner] | {"__init__"}:
            wrong.append(f"{file} imports {name}")
    assert not wrong


def test_torch_is_imported_only_where_models_are_built_or_run():
    """Neither a plan nor a cast needs a tensor library; vLLM is a process and never an import."""
    wrong = [
        f"{file} imports {name}"
        for file, owner, name in imports()
        if (name.split(".")[0] in {"torch", "transformers"}
            and owner not in {"validate", "metamodel"})
        or name.split(".")[0] == "vllm"
    ]  # fmt: skip
    assert not wrong


def test_every_part_is_in_the_table():
    """A new module must say what it may import."""
    parts = {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.suffix == ".py"}
    parts |= {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert parts - {"cli", "__main__", "__init__"} == set(ALLOWED)


@pytest.mark.parametrize(
    "arguments",
    [[], ["convert"], ["validate"], ["serve"], ["run"], ["inspect"], ["engine", "install"]],
    ids=" ".join,
)
def test_help_loads_no_tensor_library(arguments):
    """``import ckpt`` and every ``--help`` are instant."""
    program = (
        "import sys, ckpt\n"
        "from ckpt.cli import main\n"
        f"sys.argv = ['ckpt', *{arguments!r}, '--help']\n"
        "try:\n    main()\n"
        "finally:\n    assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: ckpt" in done.stdout


def test_a_conversion_with_casts_loads_no_tensor_library(tmp_path):
    """From its start to its end; the proof that the model is whole has a process of its own."""
    source, out = write_legacy(tmp_path / "run", Model(dtype=torch.float32)), tmp_path / "out"
    program = (
        "import sys\n"
        "from ckpt.cli import main\n"
        f"sys.argv = ['ckpt', 'convert', {str(source)!r}, {str(out)!r}, '--dtype', 'bf16']\n"
        "try:\n    main()\n"
        "finally:\n    print('loaded', sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded []"
    assert read_stage(out, "convert")["proof"]["proved"]
    written = load_file(out / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
