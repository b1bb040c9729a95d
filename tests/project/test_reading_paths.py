"""How much one has to read to understand a step: bounds, the list in README.md, the walk in docs/one-step.md."""

import re
from pathlib import Path

import pytest
from support.reading_paths import PATHS, count

import jaxdist
from jaxdist.config import RunConfig
from jaxdist.mesh import make_abstract_mesh, parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.plan.proof.trace import step_collectives
from jaxdist.strategy import ParallelConfig
from jaxdist.train.program import build_program

PLAIN = "a step, dp=2,tp=2"
README = Path(jaxdist.__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def plain():
    return count(PATHS[PLAIN])


def lines_of(files) -> int:
    return sum(lines for lines, _ in files.values())


def test_a_step_is_read_in_a_few_files(plain):
    assert len(plain) <= 17 and lines_of(plain) <= 2350


@pytest.mark.parametrize(
    "name, more_files, more_lines", [("a step, dp=2, ZeRO-3", 1, 270), ("a pipeline step, pp=2", 6, 1130)]
)
def test_zero_and_a_pipeline_add_their_own_files_alone(plain, name, more_files, more_lines):
    files = count(PATHS[name])
    assert len(files) <= len(plain) + more_files and lines_of(files) <= lines_of(plain) + more_lines, [*files]


def test_the_reading_order_is_that_of_a_step(plain):
    section = README.read_text(encoding="utf-8").split("## Read the code in this order")[1].split("\n## ")[0]
    assert re.findall(r"^\d+\. \[`jaxdist/([\w/.]+)`\]", section, re.MULTILINE) == [*plain]


def test_the_walk_through_a_step_has_the_messages_of_the_program():
    """Bytes and times of each row of docs/one-step.md, in its order."""
    text = (README.parent / "docs/one-step.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| (dp|tp) \| ([\d,]+) \| (\d+) \|$", text, re.MULTILINE)
    said = [("all_reduce", (axis,), int(size.replace(",", "")), int(times)) for axis, size, times in rows]
    config = RunConfig(PRESETS["proof"], ParallelConfig(parse_mesh("dp=2,tp=2")), batch_size=16)
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    assert said == [(c.kind, c.axes, c.full_bytes, c.count) for c in step_collectives(program, traced)]
