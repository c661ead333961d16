"""Which part of a conversion a process has, by its options and by what launched it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.convert.share import WHOLE, Share, deal, find_share
from ckpt.errors import OptionsError

BATCH = {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
STEP = {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "6", "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1"}


def array(task, count, least, step=1, most=None):
    most = least + (count - 1) * step if most is None else most
    values = {"ID": task, "COUNT": count, "MIN": least, "MAX": most, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


SHARES = [
    ("nothing set", {}, (0, 1)),
    ("an array from 0", array(1, 8, 0), (1, 8)),
    ("an array from 1", array(8, 8, 1), (7, 8)),
    ("an array in steps of 4", array(9, 3, 1, 4), (2, 3)),
    ("an array of one task", array(3, 1, 3), (0, 1)),
    ("an older Slurm without the greatest task",
     {k: v for k, v in array(2, 4, 0).items() if not k.endswith("MAX")}, (2, 4)),
    ("an array whose batch script runs ckpt by itself", {**BATCH, **array(1, 2, 0)}, (1, 2)),
    ("a plain batch script is no srun task", BATCH, (0, 1)),
    ("a batch script that names its step",
     {**BATCH, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, (0, 1)),
    ("a shell of salloc", {**BATCH, "SLURM_STEP_ID": "4294967290"}, (0, 1)),
    ("an extern step", {**BATCH, "SLURM_STEP_ID": "4294967292"}, (0, 1)),
    ("srun of fewer tasks than the job has", {**BATCH, **STEP, "SLURM_PROCID": "2"}, (2, 3)),
    ("srun that does not count the step's tasks",
     {**BATCH, "SLURM_STEP_ID": "7", "SLURM_PROCID": "3"}, (3, 4)),
    ("a container that passes on two variables of srun",
     {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
    ("srun in each job of an array",
     {**BATCH, **STEP, "SLURM_PROCID": "2", **array(5, 4, 3)}, (2 * 3 + 2, 12)),
    ("srun of one task in an array", {**BATCH, **STEP, "SLURM_STEP_NUM_TASKS": "1",
     "SLURM_PROCID": "0", **array(5, 4, 3)}, (2, 4)),
    ("torchrun", TORCHRUN, (5, 6)),
    ("torchrun of one process", {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
    ("ranks that a script has set", {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
    ("torchrun on each node of srun", {**BATCH, **STEP, "SLURM_PROCID": "2", **TORCHRUN}, (5, 6)),
    ("torchrun in a batch script", {**BATCH, **TORCHRUN}, (5, 6)),
    ("torchrun in each job of an array", {**BATCH, **TORCHRUN, **array(1, 2, 0)}, (11, 12)),
    ("a rank without the number of ranks", {"RANK": "1"}, (0, 1)),
    ("the number of ranks without a rank", {"WORLD_SIZE": "4"}, (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "expected"), [pytest.param(e, s, id=n) for n, e, s in SHARES])
def test_the_launcher_says_which_part_this_is(environ, expected):
    share = find_share(None, None, environ)
    assert (share.index, share.of) == expected
    assert share.partial == (expected[1] > 1)


@pytest.mark.parametrize("environ", [pytest.param(e, id=n) for n, e, _ in SHARES])
def test_one_part_means_all_of_it_whatever_launched_the_process(environ):
    assert find_share(None, 1, environ) == find_share(0, 1, environ) == WHOLE


@pytest.mark.parametrize("environ", [pytest.param(e, id=n) for n, e, _ in SHARES])
def test_options_come_before_the_environment(environ):
    share = find_share(4, 9, {**environ, "JOB_COMPLETION_INDEX": "many"})
    assert (share.index, share.of, share.origin) == (4, 9, "")


@pytest.mark.parametrize("first", [0, 1, 17])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("tasks", [1, 3])
def test_every_task_of_an_array_of_sruns_has_a_part_of_its_own(first, step, tasks):
    """Together they have all parts, once."""
    found = []
    for number in range(5):
        for process in range(tasks):
            environ = array(first + number * step, 5, first, step) | BATCH | STEP
            environ |= {"SLURM_PROCID": str(process), "SLURM_STEP_NUM_TASKS": str(tasks)}
            share = find_share(None, None, environ)
            assert share.of == 5 * tasks
            found.append(share.index)
    assert found == list(range(5 * tasks))


def test_an_indexed_job_needs_the_count_from_an_option():
    environ = {"JOB_COMPLETION_INDEX": "3"}
    assert find_share(None, 5, environ) == Share(3, 5, "JOB_COMPLETION_INDEX=3")
    with pytest.raises(OptionsError, match=r"nothing says of how many.*Give --num-shards"):
        find_share(None, None, environ)


@pytest.mark.parametrize(
    ("listed", "task"),
    [("1,5,9 told as steps of one", array(5, 3, 1, 1, most=9)),
     ("3,5 again", array(3, 2, 3, 1, most=5)),
     ("1,2,9 told as steps of four", array(2, 3, 1, 4, most=9)),
     ("a task beyond the count", array(12, 3, 0, 1)),
     ("a task before the least", array(1, 3, 2, 1)),
     ("steps of nothing", array(2, 3, 2, 0))],
)  # fmt: skip
def test_an_array_with_gaps_is_refused_with_the_way_out(listed, task):
    with pytest.raises(OptionsError) as caught:
        find_share(None, None, task)
    assert "list with gaps" in str(caught.value), listed
    assert "--shard-index $SLURM_ARRAY_TASK_ID --num-shards N" in str(caught.value)
    assert find_share(5, 9, task) == Share(5, 9)


@pytest.mark.parametrize(
    ("index", "count", "environ", "words"),
    [
        (3, None, {}, "--shard-index needs --num-shards"),
        (3, 3, {}, "--shard-index is not one of the parts (expected 0 to 2, found 3)"),
        (-1, 3, {}, "expected 0 to 2, found -1"),
        (1, 1, {}, "expected 0 to 0, found 1"),
        (0, 0, {}, "--num-shards must be at least 1"),
        (None, 8, {}, "--num-shards needs --shard-index. Say which part this is, from 0 to 7"),
        (None, 8, array(1, 4, 0), "expected 4, from SLURM_ARRAY_TASK_ID=1, found 8"),
        (None, 8, TORCHRUN, "expected 6, from RANK=5, found 8"),
        (None, 3, {"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX is not one of the parts"),
        (None, None, {"RANK": "2", "WORLD_SIZE": "2"}, "RANK is not one of the parts"),
        (None, None, {"RANK": "0", "WORLD_SIZE": "0"}, "RANK is not one of the parts"),
        (None, None, {"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is no whole number (found -1)"),
        (None, None, {"RANK": "one", "WORLD_SIZE": "2"}, "RANK is no whole number (found one)"),
        (None, None, {"RANK": "٣", "WORLD_SIZE": "9"}, "RANK is no whole number"),
        (None, None, {"RANK": "1", "WORLD_SIZE": ""}, "WORLD_SIZE is no whole number"),
        (None, None, {"SLURM_PROCID": "1"}, "SLURM_NTASKS is not set"),
        (None, None, {"SLURM_ARRAY_TASK_ID": "1"}, "SLURM_ARRAY_TASK_COUNT is not set"),
        (None, None, {**BATCH, "SLURM_STEP_ID": "x"}, "SLURM_STEP_ID is no whole number"),
        (None, 4, {"JOB_COMPLETION_INDEX": "1.0"}, "JOB_COMPLETION_INDEX is no whole number"),
    ],
)
def test_numbers_that_cannot_be_are_errors(index, count, environ, words):
    with pytest.raises(OptionsError) as caught:
        find_share(index, count, environ)
    assert words in str(caught.value)


def test_the_part_is_said_with_its_reason_and_the_way_out():
    share = find_share(None, None, array(1, 8, 0))
    assert share.note() == (
        "part 2 of 8 (--shard-index 1 --num-shards 8), from SLURM_ARRAY_TASK_ID=1; "
        "--num-shards 1 converts all of it here"
    )
    both = find_share(None, None, {**BATCH, **STEP, "SLURM_PROCID": "2", **array(5, 4, 3)})
    assert (
        "(--shard-index 8 --num-shards 12), from SLURM_ARRAY_TASK_ID=5 and SLURM_PROCID=2;"
        in both.note()
    )
    assert "part 2 of 8 (--shard-index 1 --num-shards 8);" in Share(1, 8).note()


@given(sizes=st.lists(st.integers(0, 50), max_size=40), count=st.integers(1, 9))
def test_every_item_is_dealt_to_one_part_and_the_parts_are_even(sizes, count):
    """No part has more than the smallest and one item on top."""
    items = list(enumerate(sizes))
    parts = deal(items, lambda item: item[1], count)
    assert len(parts) == count
    assert sorted(item for part in parts for item in part) == items
    assert all(part == sorted(part) for part in parts)
    loads = [sum(size for _, size in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    for index, part in enumerate(parts):
        assert Share(index, count).of_items(items, lambda item: item[1]) == part


def test_parts_of_equal_files_differ_by_one_file_at_most():
    assert [len(part) for part in deal("abcdefgh", lambda _: 5, 3)] == [3, 3, 2]
