"""The README names sections, commands and options that are there."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from dsec.cli.main import COMMANDS, main

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_contents_are_the_sections_in_their_order() -> None:
    contents = README.partition("**Contents**")[2].partition("\n## ")[0]
    sections = re.findall(r"^## (.*)$", README, re.MULTILINE)
    anchors = [re.sub(r"[^a-z0-9 -]", "", s.lower()).replace(" ", "-") for s in sections]
    assert re.findall(r"\[(.*?)\]\(#(.*?)\)", contents) == list(zip(sections, anchors, strict=True))


def calls() -> list[str]:
    """Every `dsec …` of the README, in a line of a console or between backticks."""
    spans = re.findall(r"`([^`\n]+)`|^\$ (.*)$", README, re.MULTILINE)
    texts = [part for span in spans for text in span for part in re.split(r"&&|;|\||#", text)]
    stripped = {re.sub(r"^(\s*[A-Z_]+=\S+)*\s*", "", text) for text in texts}
    return sorted(text for text in stripped if re.match(r"dsec [a-z]", text))


@pytest.mark.parametrize("call", calls())
def test_a_command_that_the_readme_names_has_its_options(call: str) -> None:
    words = re.sub(r"[\[\]…]", " ", call).split()[1:]
    assert words[0] in COMMANDS
    command = main.get_command(click.Context(main), words[0])
    if isinstance(command, click.Group) and len(words) > 1:
        command = command.commands[words[1]]
    assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known | {"--help"}
