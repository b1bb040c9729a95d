"""Every Python example in the documentation runs as it stands."""

import re
from pathlib import Path

import pytest
from conftest import RARE

from experiments.levels import LAYOUTS
from experiments.strategies import PIPELINES, STRATEGIES
from jaxdist import verify

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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


def numbers(page: str, pattern: str) -> list[int]:
    """Every number that stands for `{}` in the pattern on a page, whose lines may break anywhere."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    return [int(found.replace(",", "")) for found in re.findall(pattern.replace("{}", r"([\d,]*\d)"), text)]


@pytest.mark.parametrize(
    ("page", "pattern", "expected"),
    [
        ("README.md", "`--all` runs {} named strategies", len(STRATEGIES)),
        ("README.md", r"from one micro-batch to many \({} rows\)", len(PIPELINES)),
        ("README.md", r"\(a sample of {};", len([s for s in STRATEGIES if s.name not in RARE])),
        ("README.md", "predicted against compiled, {} layouts", len(LAYOUTS)),
        ("README.md", "trace against XLA's own plan, {} small layouts", len(LAYOUTS)),
        ("experiments/levels.py", "# {} layouts, predicted and compiled", len(LAYOUTS)),
        ("docs/plan.md", r"`python -m experiments.levels [^:]*: {} layouts", len(LAYOUTS)),
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

    first = [verify.GRADIENT_TOLERANCE[dtype] for dtype in dtypes]
    later = [verify.LATER * tolerance for tolerance in first]
    assert said("loss of each step") == [verify.LOSS_TOLERANCE[dtype] for dtype in dtypes]
    assert said("gradient norm and every") == first
    assert said("the same, later") == [*later[:2], *first[2:]]
    assert said("moments") == said("parameters") == later
