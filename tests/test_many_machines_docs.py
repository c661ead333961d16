"""The scripts in docs/many-machines.md, run as their launchers run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from builders import Model, hf_tensors, write_legacy
from converted import assert_equal, read_tensors

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "many-machines.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NAMES = ("array", "submit", "srun", "torchrun", "loop")
SCRIPTS = dict(zip(NAMES, [text for language, text in BLOCKS if language == "bash"], strict=True))
# What Slurm does with a script and its tasks, as far as ckpt sees it: real processes, started at
# once, each with the variables of sbatch(1) and srun(1).
SBATCH = """\
#!{python}
import os, re, subprocess, sys
array, script, wrap = "", None, None
for word in sys.argv[1:]:
    if word.startswith("--wrap="):
        wrap = word.partition("=")[2]
    elif not word.startswith("--"):
        script = word
environ = {{**os.environ, "SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}}
text = wrap or open(script).read()
found = re.search(r"^#SBATCH --array=(\\d+)-(\\d+)$", text, re.M)
low, high = map(int, found.groups()) if found else (0, 0)
jobs = []
for task in range(low, high + 1):
    values = {{"ID": task, "COUNT": high - low + 1, "MIN": low, "MAX": high, "STEP": 1}}
    names = {{f"SLURM_ARRAY_TASK_{{name}}": str(value) for name, value in values.items()}}
    own = {{**environ, **names}} if found else environ
    jobs.append(subprocess.Popen(["bash", "-c", text], env=own, stdout=sys.stderr))
codes = [job.wait() for job in jobs]
print(71)
sys.exit(max(codes))
"""
SRUN = """\
#!{python}
import os, subprocess, sys
own = {{"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}}
tasks = [
    subprocess.Popen(sys.argv[1:], env={{**os.environ, **own, "SLURM_PROCID": str(task)}})
    for task in range(4)
]
sys.exit(max(task.wait() for task in tasks))
"""
CKPT = '#!/bin/sh\nexec {python} -m ckpt "$@"\n'
TORCHRUN = '#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n'


@pytest.fixture
def shell(tmp_path):
    """Runs a script of the page on a small checkpoint, with these launchers in reach."""
    source, out = write_legacy(tmp_path / "run", Model(), tp=2), tmp_path / "out"
    (tmp_path / "bin").mkdir()
    programs = {"sbatch": SBATCH, "srun": SRUN, "ckpt": CKPT, "torchrun": TORCHRUN}
    for name, text in programs.items():
        program = tmp_path / "bin" / name
        program.write_text(text.format(python=sys.executable))
        program.chmod(0o755)

    def run(text, **environ):
        text = ready(text, source, out)
        (tmp_path / "convert.sh").write_text(ready(SCRIPTS["array"], source, out))
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["/bin/bash", "-euc", text], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), **environ},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.out, run.source = out, source
    return run


def ready(text, source, out):
    text = text.replace("/data/run7", str(source)).replace("/models/run7", str(out))
    return text.replace("2GB", "15kB")


def parts_said(text):
    """Which parts were told in notes, as (part, of how many)."""
    found = re.findall(r"^note: part (\d+) of (\d+)", text, re.MULTILINE)
    return sorted((int(part), int(of)) for part, of in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts", "origin"),
    [("submit", 4, "SLURM_ARRAY_TASK_ID=3"), ("srun", 4, "SLURM_PROCID=3"),
     ("torchrun", 3, "RANK=2"), ("loop", 3, "--shard-index 2 --num-shards 3")],
)  # fmt: skip
def test_each_launcher_gives_every_process_its_part_and_the_last_command_the_output(
    shell, name, parts, origin
):
    said = shell(SCRIPTS[name])
    assert parts_said(said) == [(part + 1, parts) for part in range(parts)]
    assert origin in said
    assert_equal(read_tensors(shell.out), hf_tensors(Model()))
    assert not list(shell.out.parent.glob(".out*"))


@pytest.mark.slow
def test_the_indexed_job_has_as_many_parts_as_completions(shell):
    """Each pod's command is run with the index that Kubernetes gives it."""
    (job,) = [yaml.safe_load(text) for language, text in BLOCKS if language == "yaml"]
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed"
    assert container["args"] == ["--num-shards", str(spec["completions"])]
    command = " ".join(container["command"])
    for index in range(spec["completions"]):
        text = f"{command} {' '.join(container['args'])}"
        said = shell(text, JOB_COMPLETION_INDEX=str(index))
        assert parts_said(said) == [(index + 1, spec["completions"])]
    shell(f"{command} --finalize")
    assert_equal(read_tensors(shell.out), hf_tensors(Model()))


def test_a_batch_script_without_srun_converts_all_of_it(shell):
    """Although Slurm sets the variables of a task there."""
    batch = {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    said = shell("ckpt convert /data/run7 /models/run7 --max-shard-size 2GB", **batch)
    assert parts_said(said) == []
    assert_equal(read_tensors(shell.out), hf_tensors(Model()))


def test_the_line_for_machines_has_the_fields_of_a_real_one(shell):
    (shown,) = [json.loads(text) for language, text in BLOCKS if language == "json"]
    said = shell("ckpt convert /data/run7 /models/run7 --max-shard-size 2GB --json --quiet")
    real = json.loads(said.splitlines()[0])
    assert list(shown) == list(real)
    assert {key: type(value) for key, value in shown.items()} == {
        key: type(value) for key, value in real.items()
    }
