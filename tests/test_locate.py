"""Which iteration a path means, and what is said when none is."""

from __future__ import annotations

import pytest

from ckpt.errors import SourceError
from ckpt.sources.locate import TRACKER, detect_format, locate, rank_directory

MARKERS = {
    "torch_dist": ".metadata",
    "torch_dcp": ".metadata",
    "torch": "mp_rank_00/model_optim_rng.pt",
    "deepspeed": "mp_rank_00_model_states.pt",
    "zarr": "metadata.json",
}


def complete(directory, kind="torch_dist"):
    file = directory / MARKERS[kind]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"")
    backend = {"torch_dist": "torch_dist", "zarr": "zarr"}.get(kind)
    if backend:
        (directory / "metadata.json").write_text(f'{{"sharded_backend": "{backend}"}}')
    return directory


@pytest.fixture
def run(tmp_path):
    """A run with two complete iterations and one that was interrupted."""
    for number in (10, 20):
        complete(tmp_path / f"iter_{number:07d}")
    (tmp_path / "iter_0000030").mkdir()
    (tmp_path / "iter_0000030" / "__0_0.distcp").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize("kind", MARKERS)
def test_the_format_is_told_by_the_file_that_each_must_have(tmp_path, kind):
    assert detect_format(complete(tmp_path / "iter_0000010", kind)) == kind
    assert detect_format(tmp_path) is None
    located = locate(tmp_path / "iter_0000010")
    assert (located.format, located.iteration) == (kind, 10)


def test_a19_the_tracker_wins_over_a_higher_number(run):
    """A number that is higher may be half a save."""
    (run / TRACKER).write_text("10\n")
    located = locate(run)
    assert located.directory == run / "iter_0000010"
    assert "iter_0000020, iter_0000030 came later" in located.notes[0]


def test_a19_release_is_an_iteration_like_any_other(run):
    complete(run / "release")
    (run / TRACKER).write_text("release")
    assert locate(run).directory == run / "release"
    assert locate(run, "release").iteration == "release"
    assert locate(run, 20).iteration == 20
    assert locate(run / "release").iteration == "release"


def test_an_iteration_directory_may_be_given_itself(run):
    assert locate(run / "iter_0000020").iteration == 20
    assert locate(run / "iter_0000020", 20).iteration == 20
    with pytest.raises(SourceError, match="not the one that was asked for"):
        locate(run / "iter_0000020", 10)


@pytest.mark.parametrize(
    ("tracker", "iteration", "message"),
    [
        ("10", 30, "incomplete.*__0_0.distcp.*Complete iterations: 10, 20"),
        ("10", 40, "no iteration 40 here.*Complete iterations: 10, 20"),
        ("10", "release", "no iteration release"),
        ("30", "latest", "incomplete"),
        ("40", "latest", "no iteration 40"),
        ("", "latest", "tracker file is damaged"),
        ("ten", "latest", "tracker file is damaged.*'ten'"),
        (None, "latest", "missing and several iterations are complete.*10, 20"),
    ],
)
def test_a19_no_other_iteration_is_taken_instead(run, tracker, iteration, message):
    """The message lists those that are complete."""
    if tracker is not None:
        (run / TRACKER).write_text(tracker)
    with pytest.raises(SourceError, match=message):
        locate(run, iteration)


def test_a19_without_a_tracker_a_single_complete_iteration_is_taken_and_said(tmp_path):
    complete(tmp_path / "iter_0000010")
    (tmp_path / "iter_0000020").mkdir()
    located = locate(tmp_path)
    assert located.iteration == 10
    assert "the only complete iteration" in located.notes[0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "directory is empty"),
        (["weights/", "context/"], "NeMo checkpoint, and .*weights is incomplete"),
        (["config.json"], "Hugging Face model"),
        (["iter_0000010/"], "no complete iteration, only iter_0000010"),
        (["notes.txt", "plots/"], r"no Megatron checkpoint here \(found notes.txt, plots\)"),
        (["mp_rank_00/"], "no Megatron checkpoint here"),
    ],
)
def test_a19_a20_a_directory_that_is_none_says_what_it_seems_to_be(tmp_path, names, message):
    for name in names:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_text("")
    with pytest.raises(SourceError, match=message):
        locate(tmp_path)


def test_a_path_that_is_no_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(SourceError, match=path.name):
            locate(path)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("mp_rank_00", (0,)),
        ("mp_rank_07_001", (7, 1)),
        ("mp_rank_12_003_010", (12, 3, 10)),
        ("mp_rank_0", None),
        ("mp_rank_00_000_dist", None),
        ("xmp_rank_00", None),
    ],
)
def test_ranks_are_read_from_directory_names(name, numbers):
    assert rank_directory(name) == numbers


def megatron(directory):
    directory.mkdir(parents=True)
    (directory / ".metadata").write_bytes(b"")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return directory


def explained(path):
    with pytest.raises(SourceError) as caught:
        locate(path)
    return str(caught.value)


def test_a19_a_nemo_checkpoint_names_the_path_of_its_weights(tmp_path):
    """Whether the checkpoint's own directory is given or its context."""
    nemo = tmp_path / "model--val_loss=1.2-step=99-last"
    weights = megatron(nemo / "weights")
    (nemo / "context").mkdir()
    (nemo / "context" / "model.yaml").write_text("")
    assert f"a NeMo checkpoint. Give its Megatron checkpoint, {weights}" in explained(nemo)
    assert f"holds no weights. Give {weights}" in explained(nemo / "context")
    assert locate(weights).format == "torch_dist"
    (weights / ".metadata").unlink()
    assert f"{weights} is incomplete" in explained(nemo)


@pytest.mark.parametrize("place", ["dist_ckpt", "model/dist_ckpt"])
@pytest.mark.parametrize("above", ["", "global_step_20", "global_step_20/actor"])
def test_a19_a_verl_run_names_the_paths_of_its_weights(tmp_path, place, above):
    """From its root, a step or the actor; both layouts; every candidate and no choice."""
    found = [megatron(tmp_path / f"global_step_{n}" / "actor" / place) for n in (20, 100)]
    (tmp_path / "global_step_100" / "actor" / "huggingface").mkdir()
    (tmp_path / TRACKER).write_text("100")
    text = explained(tmp_path / above)
    assert "a verl run" in text
    assert str(found[0]) in text
    assert (str(found[1]) in text) == (above == "")
    assert locate(found[0]).format == "torch_dist"


def test_a19_a_verl_run_of_another_kind_says_which(tmp_path):
    """Weights that are a Hugging Face model already, FSDP's own shards, and none."""
    actor = tmp_path / "global_step_20" / "actor"
    (actor / "model" / "huggingface").mkdir(parents=True)
    assert "a verl run without weights" in explained(tmp_path)
    (actor / "model" / "huggingface" / "model.safetensors").write_bytes(b"")
    assert f"Hugging Face models already. See {actor / 'model' / 'huggingface'}" in explained(actor)
    (actor / "model_world_size_8_rank_0.pt").write_bytes(b"")
    assert f"--backend fsdp --local_dir {actor}" in explained(tmp_path)


def test_a19_an_iteration_whose_index_is_missing_is_incomplete_and_not_empty(tmp_path):
    """The iteration's own directory is given."""
    directory = tmp_path / "iter_0000010"
    directory.mkdir()
    (directory / "__0_0.distcp").write_bytes(b"")
    assert "interrupted or is still going on: .distcp files without .metadata" in explained(
        directory
    )


@pytest.mark.parametrize("text", ["20", "global_step20", "20\n"])
def test_a19_deepspeed_steps_are_found_by_their_own_tracker(tmp_path, text):
    for number in (10, 20, 30):
        complete(tmp_path / f"global_step{number}", "deepspeed")
    (tmp_path / "latest").write_text(text)
    located = locate(tmp_path)
    assert located.iteration == 20
    assert "global_step30 came later" in located.notes[0]
