"""Every Python example in the documentation runs as it stands."""

import ast
import dataclasses
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import tyro

from experiments.bench.flags import BenchFlags
from experiments.bench.levels import LAYOUTS
from experiments.bench.speed import plan_step
from experiments.calibration import published
from experiments.plan_report import layout_words, row_layout
from experiments.strategies import EXPERTS, PIPELINES, STRATEGIES
from jaxdist import parallel, parity
from jaxdist.config import RunConfig
from jaxdist.mesh import parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.plan.explain import error_bar
from jaxdist.plan.fit_remat import fit_remat
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.search import Candidates, score, search
from jaxdist.plan.time_model import efficiency_of
from jaxdist.strategy import ParallelConfig, PrecisionConfig

ROOT = Path(__file__).resolve().parents[2]
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


def test_docs_are_no_longer_than_85_000_words():
    """Words that have a letter or a digit: bars of tables are none."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sum(bool(re.search(r"\w", word)) for text in texts for word in text.split()) <= 85_000


@pytest.mark.exhaustive
def test_the_plan_in_prose_is_what_is_planned():
    config = RunConfig(
        PRESETS["7b"],
        ParallelConfig(parse_mesh("dp=32"), 3, overlap=True, accumulate=4),
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
        ("README.md", r"\| {} strategies, first gradients", len(STRATEGIES) + len(EXPERTS)),
        ("README.md", "counted while {} layouts ran", len(LAYOUTS)),
        ("docs/proof.md", "one step of each of {} layouts", len(LAYOUTS)),
        ("docs/proof.md", "`--all` runs {} named strategies", len(STRATEGIES) + len(EXPERTS)),
        ("docs/experts.md", "every leaf against one device, {} layouts", len(EXPERTS)),
        ("docs/proof.md", r"from one micro-batch to many \({} rows\)", len(PIPELINES)),
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


PLAN = "\n".join((ROOT / f"docs/plan{which}.md").read_text(encoding="utf-8") for which in ("", "-evidence"))


def rows_under(heading: str, page: str = "docs/plan-evidence.md") -> list[list[str]]:
    """Cells of the first table under a heading, without its titles."""
    text = (ROOT / page).read_text(encoding="utf-8").split(heading, 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table]


def test_the_best_of_7b_and_70b_are_as_near_as_the_prose_says():
    text = PLAN
    rows = rows_under("### The best layouts of 7B and 70B")
    errors = {row[2]: abs(float(row[4]) / float(row[5]) - 1) for row in rows}
    most = [
        max(error for name, error in errors.items() if ("pp=" in name) == with_pipeline) for with_pipeline in (1, 0)
    ]
    assert most[0] <= 0.02 and round(100 * most[1], 1) == 3.9
    for page in (text, (ROOT / "README.md").read_text(encoding="utf-8")):
        assert re.search(r"within\s+2 % with a pipeline and 3\.9 % without", page)
    formula = [abs(float(row[3]) / float(row[4]) - 1) for row in rows]
    low, high = re.search(r"([\d.]+) to ([\d.]+) % for the 7B and 70B", text.replace("\n", " ")).groups()
    assert (round(100 * min(formula), 1), round(100 * max(formula), 1)) == (float(low), float(high))


@pytest.mark.exhaustive
def test_the_published_layouts_in_prose_are_beside_what_is_recommended():
    rows = rows_under("### Published layouts beside what is recommended")
    assert len(rows) == len(published.ROWS)
    for said, row in zip(rows, published.ROWS, strict=True):
        found = published.compare(row)
        theirs, ours = (layout_words(row_layout(one, 0)) for one in (found.theirs, found.ours))
        figures = [
            (f"{float(one.time.total[0]):.2f}", f"{float(one.memory.total[0]) / 2**30:.1f}")
            for one in (found.theirs, found.ours)
        ]
        assert said[:2] == [row.name, f"{row.num_devices:,}"] and said[3] == f"{row.seconds:.2f}"
        assert (said[4], *said[5:7]) == (theirs, *figures[0])
        assert (said[7], *said[8:]) == ("the same" if ours == theirs else ours, *figures[1])


def test_the_flags_list_every_preset():
    (line,) = [
        line for line in (ROOT / "docs/flags.md").read_text(encoding="utf-8").splitlines() if "`--preset`" in line
    ]
    assert set(re.findall(r"`([\w.-]+)`", line)) - {"--model", "--preset", "verify"} == set(PRESETS)


def test_every_keyword_of_a_collective_is_documented():
    """Keywords that change what a function returns; `all_gather(replicated=True)` is typed otherwise."""
    text = (ROOT / "docs/collectives.md").read_text(encoding="utf-8")
    for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather_to", "scatter_from"):
        parameters = inspect.signature(getattr(parallel, name)).parameters.values()
        for parameter in parameters:
            if parameter.kind is parameter.KEYWORD_ONLY:
                assert re.search(rf"`{name}\(.*{parameter.name}=", text), (name, parameter.name)


@pytest.mark.exhaustive
def test_what_auto_repeats_is_predicted_as_the_page_says():
    rows = rows_under("### What backward repeats, array by array")
    parallel = ParallelConfig(parse_mesh("dp=8,tp=8"), zero=3, sp=True)
    config = RunConfig(PRESETS["llama3-8b"], parallel, precision=PrecisionConfig("bfloat16"), batch_size=64)
    cluster = Cluster(find_hardware("h100"), 8, 8)
    assert [row[0] for row in rows] == ["none", "auto-30", "auto-20", "auto-10", "block"]
    for word, seconds, formula, *_ in rows:
        if word.startswith("auto-"):
            limit = float(word.removeprefix("auto-")) * 2**30
            chosen = fit_remat(config, cluster, limit, "cudnn").config
        else:
            chosen = dataclasses.replace(config, parallel=dataclasses.replace(parallel, remat=word))
        found = score(chosen, Candidates.of(chosen), cluster, "cudnn")
        assert f"{found.time.total[0]:.2f}" == seconds and f"{found.memory.total[0] / 2**30:.2f}" == formula


def test_docstrings_begin_with_their_subject_and_arguments_can_be_parsed():
    """No headless "Of the rows, ...": the first word names what a function returns or does, or what a field is.

    What is indented below a line "Args: ..." would be read as a list of arguments by the site, which is built strictly.
    """
    headless = []
    for path in [*ROOT.glob("jaxdist/**/*.py"), *ROOT.glob("experiments/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                text = node.value.value.lstrip()
                headless += [f"{path.name}: {text[:60]}"] * text.startswith(("Of ", "Those ", "That of ", "What is "))
                headless += [f"{path.name}: {found[0]}" for found in re.finditer(r"\n( *)Args: .*\n\1 +.*", text)]
    assert not headless


ERRORS = ("ConfigError", "BadCheckpoint", "BadWeights")
FACTS = r"there (is|are) no|\bno such|\bhas no\b|cannot|(is|are) not installed|would change nothing"


def test_errors_say_what_must_hold():
    """What a ConfigError requires is a rule ("num_heads must divide by tp"), or a fact of the few kinds above."""
    neither = []
    for path in [*ROOT.glob("jaxdist/**/*.py"), *ROOT.glob("experiments/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS and len(node.args) > 1:
                required = node.args[1]
                parts = required.values if isinstance(required, ast.JoinedStr) else [required]
                if isinstance(required, ast.JoinedStr | ast.Constant):
                    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
                    if not re.search(rf"\bmust |{FACTS}", text):
                        neither.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert not neither, "\n".join(neither)


def test_the_steps_on_a_gpu_in_prose_are_those_that_were_measured():
    runs = json.loads((ROOT / "docs/gpu/h100.json").read_text(encoding="utf-8"))["runs"]
    alone, _, peers = ({row["name"]: row["value"] for row in run["rows"]} for run in runs[:3])
    table = rows_under("## One NVIDIA GPU", "docs/benchmarks.md")
    assert len(table) == 6
    for name, milliseconds, speed, _, peak in table:
        found, key = (alone, "step") if "autotuner" in name else (peers, f"one device: {name}")
        (size,) = (v for each, v in found.items() if each.startswith((f"{key}: peak", "peak: compiler's")))
        assert (milliseconds, speed) == (f"{1e3 * found[key]:.1f}", f"{found[f'{key}: speed']:,.0f}"), name
        assert peak == f"{size / 2**20:,.0f}", name
    steps = [run["rows"] for run in runs if "bench step" in run["command"]][-4:]
    for rows, (_, _, *cells) in zip(
        steps, rows_under("**Other models, the third day**", "docs/benchmarks.md"), strict=True
    ):
        found = {row["name"]: row for row in rows}
        step, plan, mfu = found["step"], found["step: time by the plan"], found["step: MFU, full attention"]
        (size,) = (row["value"] for name, row in found.items() if name.startswith("compiler's plan"))
        expected = [f"{1e3 * step['value']:.1f}", f"{1e3 * plan['value']:.1f}", f"{plan['ratio']:.2f}"]
        expected += [f"{found['step: speed']['value']:,.0f}", f"{100 * mfu['value']:.0f} %", f"{size / 2**20:,.0f}"]
        assert cells == expected
    (profile,) = (run for run in runs if "kernels of a step" in run)
    kernels, slow = profile["kernels of a step"], profile["slow for their bytes"].values()
    page = " ".join((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").split())
    assert all(f"({each['ms']} ms" in page and f"at {each['TB/s']} TB/s" in page for each in slow)
    of_steps = [row for run in runs if "bench step" in run["command"] for row in run["rows"] if row["name"] == "step"]
    measured = {
        f"{1e3 * seconds:.1f}" for seconds in (*(row["value"] for row in of_steps), peers["one device: jaxdist"])
    }
    for _, compiled, took, ratio, _ in rows_under("**From the compiled program to the time.**", "docs/benchmarks.md"):
        assert took in measured
        assert f"{float(compiled) / float(took):.2f}" == ratio and abs(float(compiled) / float(took) - 1) < 0.03
    for name, number, milliseconds, *_ in rows_under("**Where the 34.4 ms go.**", "docs/benchmarks.md"):
        assert kernels[name] == {"ms": float(milliseconds), "kernels": int(number)}
    (products,) = (run["rows"] for run in runs if "grouped_kernels" in run["command"])
    ratios = {row["name"]: row["ratio"] for row in products}
    for name, *cells in rows_under("- **Experts.**", "docs/benchmarks.md"):
        assert cells == [f"{ratios[f'{name}, {load}']:.2f}" for load in ("even", "skewed", "random")], name


def test_steps_on_an_h100_took_what_the_report_says_of_the_plan():
    runs = json.loads((ROOT / "docs/gpu/h100.json").read_text(encoding="utf-8"))["runs"]
    ratios = []
    for run in runs:
        if "bench step --no-phases" in run["command"]:
            (seconds,) = (row["value"] for row in run["rows"] if row["name"] == "step")
            config = tyro.cli(BenchFlags, args=shlex.split(run["command"])[3:]).run_config()
            ratios.append(seconds / plan_step(config, find_hardware("h100"), "cudnn").total[0])
    said = find_hardware("h100").measured
    assert f"took {min(ratios):.2f} to {max(ratios):.2f} times" in said, ratios
    found, known = score(config, Candidates.of(config), Cluster(find_hardware("h100"), 1, 1)), efficiency_of("h100")
    assert said in error_bar(found, 0, known)
    assert said not in error_bar(found, 0, dataclasses.replace(known, matmul=known.matmul / 2))  # of a user's own


def test_a_run_that_continued_on_a_gpu_has_the_bits_of_the_one_it_continued():
    runs = json.loads((ROOT / "docs/gpu/h100.json").read_text(encoding="utf-8"))["runs"]
    for kind, apart in (("gpt", True), ("moe", False)):
        first, second, continued = (
            {line["step"]: line for line in run["metrics"]}
            for run in runs
            if run["command"].endswith((f"--out {kind}1", f"--out {kind}2", f"--out {kind}3"))
        )
        assert continued == {step: first[step] for step in range(7, 13)}
        assert (first != second) == apart
