"""Every Python example in the documentation runs as it stands."""

import re
from pathlib import Path

import pytest

from experiments.bench.levels import LAYOUTS
from experiments.strategies import EXPERTS, PIPELINES, STRATEGIES
from jaxdist import parity
from jaxdist.config import ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.mesh import parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.search import Candidates, score, search

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL), 1)
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code):
    exec(compile(code, "<example>", "exec"), {"__name__": "example"})


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(((?!https?:|#)[^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.exhaustive
def test_the_plan_in_prose_is_what_is_planned():
    config = RunConfig(
        PRESETS["7b"],
        ParallelConfig(parse_mesh("pp=2,dp=16"), 1, overlap=True, schedule="interleaved", microbatches=8, chunks=16),
        precision=PrecisionConfig("bfloat16"),
        batch_size=512,
    )
    found = score(config, Candidates.of(config), Cluster(find_hardware("h100"), 4), "cudnn")
    said = f"{found.time.total[0]:.2f} s ± {found.time.error[0]:.0%} a step, {found.time.mfu[0]:.0%} MFU, "
    said += f"{found.memory.total[0] / 2**30:.1f} GiB a device"
    number = search(config, Cluster(find_hardware("h100"), 4), "cudnn").num_layouts
    text = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    assert said in text and f"{number:,}" in text
    assert said in (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")


def numbers(page: str, pattern: str) -> list[int]:
    """Every number that stands for `{}` in the pattern on a page, whose lines may break anywhere."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    return [int(found.replace(",", "")) for found in re.findall(pattern.replace("{}", r"([\d,]*\d)"), text)]


@pytest.mark.parametrize(
    ("page", "pattern", "expected"),
    [
        ("README.md", r"\| {} strategies, first gradients", len(STRATEGIES)),
        ("README.md", "counted while {} layouts ran", len(LAYOUTS)),
        ("docs/proof.md", "one step of each of {} layouts", len(LAYOUTS)),
        ("docs/proof.md", "`--all` runs {} named strategies", len(STRATEGIES) + len(EXPERTS)),
        ("docs/experts.md", "every leaf against one device, {} layouts", len(EXPERTS)),
        ("docs/proof.md", r"from one micro-batch to many \({} rows\)", len(PIPELINES)),
        ("README.md", r"\(a sample of {};", sum(s.sample for s in STRATEGIES)),
        ("docs/commands.md", "predicted against compiled, {} layouts", len(LAYOUTS)),
        ("docs/plan.md", "trace against XLA's own plan, {} small layouts", len(LAYOUTS)),
        ("experiments/bench/levels.py", "# {} layouts, predicted and compiled", len(LAYOUTS)),
        ("docs/plan-evidence.md", r"`python -m experiments.bench levels [^:]*: {} layouts", len(LAYOUTS)),
    ],
)
def test_numbers_in_prose_are_those_of_the_code(page, pattern, expected):
    assert numbers(page, pattern) == [expected]


def test_the_tolerances_in_prose_are_those_of_the_comparison():
    """The table of docs/proof.md, row by row."""
    text = (ROOT / "docs/proof.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(): [x.strip() for x in cells[2:6]]
        for cells in (r.split("|") for r in text.splitlines())
        if len(cells) == 7
    }
    dtypes = ("float32", "float64", "bfloat16", "float16")

    def said(start: str) -> list[float]:
        (found,) = [values for name, values in rows.items() if name.startswith(start)]
        return list(map(float, found))

    first = [parity.GRADIENT_TOLERANCE[dtype] for dtype in dtypes]
    later = [parity.LATER * tolerance for tolerance in first]
    assert said("loss of each step") == [parity.LOSS_TOLERANCE[dtype] for dtype in dtypes]
    assert said("gradient norm and every") == first
    assert said("the same, later") == [*later[:2], *first[2:]]
    assert said("moments") == said("parameters") == later
    assert said("counts of experts") == [*first[:2], *(tolerance / 10 for tolerance in first[2:])]
