"""What a user asks for: nothing is passed over silently, and each refusal says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import Model, write_legacy, write_tokenizer
from click.testing import CliRunner
from tiny_megatron import TINY_FAMILIES, Ranks, TinyModel
from tiny_megatron import write_legacy as write_tiny

from ckpt.cli import main
from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, plan_conversion
from ckpt.errors import FamilyError, OptionsError, OutputError, PlanError, SourceError
from ckpt.inspection import inspect_directory


@pytest.fixture
def run(tmp_path):
    return write_legacy(tmp_path / "run", Model(), tp=2)


def test_a_vocabulary_below_that_of_training_is_a_warning(run):
    """Rows of tokens are not called padding."""
    notes = plan_conversion(run, ConvertOptions(vocab_size=100)).notes
    assert any("--vocab-size 100 is below the 131" in note for note in notes)
    assert not any("--vocab-size" in n for n in plan_conversion(run, ConvertOptions()).notes)


def test_a_vocabulary_above_the_stored_rows_says_where_it_came_from(run):
    """The option, not only the number."""
    with pytest.raises(OptionsError, match="at most 160, found 161 from --vocab-size"):
        plan_conversion(run, ConvertOptions(vocab_size=161))


def test_an_argument_that_nothing_reads_is_refused_with_the_nearest(run):
    """A typo never changes nothing in silence."""
    with pytest.raises(OptionsError, match=r"--set rotry_base: .*Did you mean rotary_base"):
        plan_conversion(run, ConvertOptions(overrides=("rotry_base=5",)))
    args = plan_conversion(run, ConvertOptions(overrides=("rotary_base=5",))).args
    assert args.rotary_base == 5


@pytest.mark.parametrize(
    "text",
    ["rotary_base=-5", "rotary_base=0", "norm_epsilon=-1", "rotary_base=.nan", "rotary_base=.inf"],
)
def test_a_constant_that_no_model_has_is_refused(run, text):
    """Not written into config.json as it is."""
    with pytest.raises(FamilyError, match="must be a number above 0"):
        plan_conversion(run, ConvertOptions(overrides=(text,)))


@pytest.mark.parametrize("count", [10**6, 10**30])
@pytest.mark.parametrize("name", ["num_layers", "num_experts", "mtp_num_layers"])
def test_an_absurd_count_stops_at_once(tmp_path, name, count):
    """It neither fills the memory nor takes for ever."""
    source = write_tiny(tmp_path / "run", TinyModel("deepseek"), Ranks())
    options = ConvertOptions(overrides=(f"{name}={count}", "moe_layer_freq=1"))
    with pytest.raises((FamilyError, PlanError)):
        plan_conversion(source, options)


def test_the_plan_shows_its_notes(run):
    """What a conversion warns of, its plan warns of."""
    result = CliRunner().invoke(main, ["convert", str(run), "out", "--plan"])
    assert result.exit_code == 0, result.output
    assert "note: 29 padding rows of the vocabulary left out" in result.stdout


def test_an_output_inside_the_checkpoint_is_refused(run):
    """Training's directory is never written to."""
    for place in (run / "iter_0000010" / "out", run / "iter_0000010"):
        with pytest.raises(OutputError, match=r"inside the checkpoint|exists"):
            convert_checkpoint(run, place, ConvertOptions())


@pytest.mark.parametrize("linked", [False, True])
def test_an_output_that_holds_the_checkpoint_never_replaces_it(run, tmp_path, linked):
    """--overwrite removes the older output with all that is in it."""
    import shutil

    out = tmp_path / "out"
    convert_checkpoint(run, out, ConvertOptions())
    shutil.copytree(run, out / "training" / "run")
    (tmp_path / "link").symlink_to(out)
    source = (tmp_path / "link" if linked else out) / "training" / "run"
    before = sorted(path for path in out.rglob("*"))
    with pytest.raises(OutputError, match="the checkpoint lies inside the output"):
        convert_checkpoint(source, out, ConvertOptions(overwrite=True))
    assert sorted(path for path in out.rglob("*")) == before


def test_an_output_without_a_name_is_refused(run, tmp_path, monkeypatch):
    """The working directory cannot be replaced under whoever stands in it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="no name of its own"):
        convert_checkpoint(run, Path(), ConvertOptions())


def test_an_output_that_is_in_the_way_stops_before_anything_is_read(tmp_path):
    """The cheapest check comes first."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(OutputError, match="exists"):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "out", ConvertOptions())


def test_a_file_is_not_called_absent(run):
    """The directory is asked for."""
    with pytest.raises(SourceError, match=r"a file, not a checkpoint\. Give its directory"):
        inspect_directory(run / "latest_checkpointed_iteration.txt")


def test_an_error_names_only_the_sides_that_it_knows(run):
    """Never 'expected None'."""
    result = CliRunner().invoke(main, ["convert", str(run), "out", "--set", "nonsense"])
    assert result.exit_code == 1
    assert "None" not in result.stderr
    assert "(found nonsense)" in result.stderr


def test_without_a_tokenizer_config_names_no_token_ids(run, tmp_path):
    """A class's own numbers for begin and end of text are those of another vocabulary."""
    convert_checkpoint(run, tmp_path / "out", ConvertOptions())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["bos_token_id"] is config["eos_token_id"] is None
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 131)
    convert_checkpoint(run, tmp_path / "with", ConvertOptions(tokenizer=tokenizer))
    config = json.loads((tmp_path / "with" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 130)


def test_a_model_of_an_unknown_class_is_not_called_whole(run, tmp_path):
    """What could not be compared has not passed."""
    convert_checkpoint(run, tmp_path / "out", ConvertOptions())
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "model_type": "foo", "architectures": ["Foo"]}))
    result = CliRunner().invoke(main, ["inspect", "--check", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "unknown: no model to compare with" in result.stdout


def test_inspect_says_what_a_family_warns_of(tmp_path):
    """Known before hours of writing."""
    assert "deepseek-lite" in TINY_FAMILIES
    model = TinyModel("deepseek-lite", args={"moe_router_pre_softmax": False})
    facts = inspect_directory(write_tiny(tmp_path / "run", model, Ranks())).as_dict()
    assert any("norm_topk_prob" in note for note in facts["notes"])
