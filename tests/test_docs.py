"""The documents say what the program does: commands, options, outputs, targets, formats."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import make_docs
import pytest
import yaml
from click.testing import CliRunner

from ckpt.arch import ARCHITECTURES
from ckpt.cli import main as ckpt
from ckpt.config import PipelineOptions, load_pipeline, parse_options
from ckpt.errors import EXIT_BUG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from ckpt.sources import FORMATS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = dict(make_docs.commands(ckpt, "ckpt"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The other commands start servers and have tests of their own.
CHEAP = ("ckpt inspect", "ckpt convert", "ckpt validate", "ckpt --version")


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [text for language, text in found if language in languages]


def shell_lines(page: Path) -> list[str]:
    """Every command that a page shows, with continued lines joined."""
    shown = []
    for text in blocks(page, "console"):
        joined = text.replace("\\\n", " ")
        shown += [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
    for text in blocks(page, "sh", "bash", "shell"):
        shown += text.replace("\\\n", " ").splitlines()
    return [line for line in shown if line.strip() and not line.startswith("#")]


VARYING = re.compile(
    r"(?<=transformers  )\d\.\S+|\d+\.\d s|\d\.\d+e-\d+|sequence \d+, position \d+"
)
EVERY_LINE = [(page, line) for page in PAGES for line in shell_lines(page)]
CKPT_LINES = [(page, line) for page, line in EVERY_LINE if line.startswith("ckpt ")]


def split(line: str) -> tuple[str, list[str]]:
    """The full name of the command in a line, and its words."""
    words = shlex.split(line, comments=True)
    for size in (3, 2):
        if " ".join(words[:size]) in COMMANDS:
            return " ".join(words[:size]), words[size:]
    return words[0], words[1:]


def named(lines: list[tuple[Path, str]]) -> list[object]:
    return [pytest.param(line, id=f"{page.name}: {line}") for page, line in lines]


@pytest.mark.parametrize("page", make_docs.pages(), ids=lambda page: page.name)
def test_generated_pages_are_current(page):
    assert page.read_text(encoding="utf-8") == make_docs.pages()[page], "run make docs"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_shown_in_the_readme(name):
    assert name in [split(line)[0] for page, line in CKPT_LINES if page.name == "README.md"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name):
    options = [item for item in COMMANDS[name].params if isinstance(item, click.Option)]
    assert [item.name for item in options if not item.help] == []


@pytest.mark.parametrize("line", named(CKPT_LINES))
def test_commands_in_the_documents_exist_with_their_options(line):
    name, words = split(line)
    command = COMMANDS.get(name, ckpt)
    known = {text for item in command.params for text in item.opts} | {"--help", "-h"}
    used = {word.partition("=")[0] for word in words if word.startswith("-")}
    assert used <= known
    assert name in COMMANDS or used


@pytest.mark.parametrize(
    "line", named([item for item in EVERY_LINE if item[1].startswith("make ")])
)
def test_make_targets_in_the_documents_exist(line):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    words = shlex.split(line, comments=True)
    assert {word for word in words[1:] if "=" not in word} <= targets


def story() -> list[tuple[str, str]]:
    """Commands and outputs of the README that cost little, in order; they build on each other."""
    parts = [
        part.partition("\n")
        for text in blocks(ROOT / "README.md", "console")
        for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    ]
    return [(line, output) for line, _, output in parts if line.startswith(CHEAP)]


def test_the_readme_shows_what_the_commands_print(tmp_path, monkeypatch):
    """Seconds, versions, and figures that depend on the processor, are not compared."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert len(story()) > 3
    for line, expected in story():
        result = CliRunner().invoke(ckpt, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
        assert VARYING.sub("N", result.stdout).split() == VARYING.sub("N", expected).split()


@pytest.mark.parametrize("text", blocks(ROOT / "README.md", "yaml"))
def test_pipelines_in_the_readme_are_valid(text):
    parse_options(PipelineOptions, yaml.safe_load(text))


def test_the_pipeline_at_the_root_is_valid_and_its_paths_exist():
    options = load_pipeline(ROOT / "pipeline.yaml")
    assert options.source.path.is_dir()
    assert options.convert.tokenizer is not None
    assert options.convert.tokenizer.is_dir()


@pytest.mark.parametrize("family", [item.model_class for item in ARCHITECTURES.values()])
def test_every_family_is_named_in_the_readme(family):
    assert f"`{family}`" in README


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_named_in_the_readme(name):
    assert f"`{name}`" in README


@pytest.mark.parametrize("code", [0, EXIT_FAILED, EXIT_USAGE, EXIT_BUG, EXIT_INTERRUPTED])
def test_every_exit_code_is_in_the_readme(code):
    assert f"| {code} |" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_holds_a_mark_of_something_to_be_filled_in(page):
    assert not re.search(r"@@|TODO|FIXME|XXX|TBD", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
