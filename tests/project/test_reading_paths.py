"""How much one has to read to understand a step: bounds, and the list in README.md."""

import re
from pathlib import Path

import pytest
from support.reading_paths import PATHS, count

import jaxdist

PLAIN = "a step, dp=2,tp=2"
README = Path(jaxdist.__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def plain():
    return count(PATHS[PLAIN])


def lines_of(files) -> int:
    return sum(lines for lines, _ in files.values())


def test_a_step_is_read_in_a_few_files(plain):
    assert len(plain) <= 17 and lines_of(plain) <= 2500


@pytest.mark.parametrize(
    "name, more_files, more_lines", [("a step, dp=2, ZeRO-3", 1, 270), ("a pipeline step, pp=2", 6, 1120)]
)
def test_zero_and_a_pipeline_add_their_own_files_alone(plain, name, more_files, more_lines):
    files = count(PATHS[name])
    assert len(files) <= len(plain) + more_files and lines_of(files) <= lines_of(plain) + more_lines, [*files]


def test_the_reading_order_is_that_of_a_step(plain):
    section = README.read_text(encoding="utf-8").split("## Read the code in this order")[1].split("\n## ")[0]
    assert re.findall(r"^\d+\. \[`jaxdist/([\w/.]+)`\]", section, re.MULTILINE) == [*plain]
