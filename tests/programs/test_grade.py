"""The tasks of the labs: every solution passes, and what people write instead is refused for the reason that it has."""

import inspect
import json
import re
import signal

import pytest

from experiments.entry import run_program
from experiments.labs import COURSE, solutions
from experiments.labs.grade import Fault, GradeFlags, grade, main
from experiments.labs.tasks import TASKS
from jaxdist.runtime.devices import acquire_devices


def graded(task: str, source: str) -> Fault | None:
    acquire_devices(4, "cpu")
    names = dict(vars(solutions))
    exec(compile(source, solutions.__file__, "exec"), names)
    return grade(task, names[task], solutions.__file__).fault


@pytest.mark.parametrize("task", TASKS)
def test_a_solution_passes(task):
    assert graded(task, inspect.getsource(getattr(solutions, task))) is None


def test_a_loop_that_does_not_run_on_two_ranks_is_no_fault():
    """Its collectives are in the program's text, and are never sent."""
    source = inspect.getsource(solutions.scaled_step)
    loop = "half = lax.fori_loop(2, lax.axis_size(axis), lambda _, half: half + 0 * lax.psum(half, axis), half)"
    assert graded("scaled_step", source.replace("    grads = jax.grad", f"    {loop}\n    grads = jax.grad")) is None


ROUND_AND_ROUND = """def all_reduce(x, axis):
    n = lax.axis_size(axis)
    total = held = x
    for _ in range(n - 1):
        held = lax.ppermute(held, axis, [(rank, (rank + 1) % n) for rank in range(n)])
        total = total + held
    return total
"""
GATHERED_WEIGHTS = """def column_row_mlp(x, up, down, dy, axis):
    def mlp(x, up, down):
        up, down = lax.all_gather(up, axis, axis=1, tiled=True), lax.all_gather(down, axis, tiled=True)
        return jax.nn.gelu(x @ up) @ down
    y, pull_back = jax.vjp(mlp, x, up, down)
    dx, dup, ddown = pull_back(dy)
    n = lax.axis_size(axis)
    return y, dx, dup / n, ddown / n
"""
GATHERED_LOGITS = """def vocabulary_loss(h, table, targets, axis):
    logits = lax.all_gather(h @ table.T, axis, axis=1, tiled=True)
    shares = jax.nn.softmax(logits)
    dlogits = shares - jax.nn.one_hot(targets, shares.shape[1])
    mine = lax.dynamic_slice_in_dim(dlogits, lax.axis_index(axis) * len(table), len(table), 1)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1).sum()
    return loss, lax.psum(mine @ table, axis), mine.T @ h
"""
GATHERED_KEYS = """def ring_attention(q, k, v, do, axis):
    def attend(q, k, v):
        k, v = lax.all_gather((k, v), axis, tiled=True)
        seen = lax.axis_index(axis) * len(q) + jnp.arange(len(q))[:, None] >= jnp.arange(len(k))
        return jax.nn.softmax(jnp.where(seen, q @ k.T / math.sqrt(q.shape[1]), -jnp.inf)) @ v
    o, pull_back = jax.vjp(attend, q, k, v)
    return o, *pull_back(do)
"""
# What a wrong value looks like, of some below.
LIKE = {
    "no transpose": "the ranks' arrays add up to the right one",
    "a mean over tp": "0.5 times the right one (1/2: a mean, not a sum)",
    "the neighbour's part": "what rank 1 should have",
    "no largest logit": "not finite",
}
# (task, what stands in its solution or None for all of it, what a person writes, why that is refused: the reason, the
# number of ranks or stages, and the result).
WRONG = {
    "a mean of the ranks' means": (
        "mean_gradient",
        "lax.psum((total, count, grads), axis)",
        "lax.pmean((total / count, 1.0, jax.tree.map(lambda g: g / count, grads)), axis)",
        "value/2/loss",
    ),
    "a gradient of the sum": ("mean_gradient", "lambda g: g / count", "lambda g: g", "value/2/gradient"),
    "not by hand": ("all_reduce", "return chunks.reshape(x.shape)", "return lax.psum(x, axis)", "collective/2"),
    "a neighbour's alone": (
        "all_reduce",
        "return chunks.reshape(x.shape)",
        "return x + lax.ppermute(x, axis, to_the_right)",
        "value/3/sum",
    ),
    "everything goes round": (
        "all_reduce",
        None,
        ROUND_AND_ROUND,
        "bytes/3",
    ),
    "a message that goes past the last rank": (
        "all_reduce",
        None,
        ROUND_AND_ROUND.replace("(rank + 1) % n", "rank + 1"),
        "collective/2",
    ),
    "two messages for one rank": ("all_reduce", None, ROUND_AND_ROUND.replace("(rank + 1) % n", "0"), "raised"),
    "what fails as it runs": (
        "newton_schulz",
        None,
        "def newton_schulz(x, axis):\n    return jax.pure_callback(lambda x: 1 / 0, x, x)",
        "raised",
    ),
    "a transpose without a gather": (
        "reduce_scatter",
        "        dx = dx.at[(me - step) % n].set(part)\n",
        "",
        "value/2/dx",
    ),
    "the neighbour's part": ("reduce_scatter", "return y,", "return lax.ppermute(y, axis, to_the_right),", "value/2/y"),
    "a message for each array": (
        "bucketed_sum",
        "flat = lax.psum(jnp.concatenate([grad.ravel() for grad in bucket]), axis)",
        "flat = jnp.concatenate([lax.psum(grad.ravel(), axis) for grad in bucket])",
        "messages/2",
    ),
    "a tuple of sums": ("bucketed_sum", "return summed", "return tuple(summed)", "results//sums"),
    "one bucket": ("bucketed_sum", "grad.size > most", "grad.size > 1e9", "messages/2"),
    "a mean of gradients": ("bucketed_sum", "lax.psum(", "lax.pmean(", "value/2/sums"),
    "whole gradients, then a part": (
        "zero1_step",
        "lax.psum_scatter(grads[name], axis, tiled=True)",
        "lax.dynamic_slice_in_dim(lax.psum(grads[name], axis), me * len(momentum[name]), len(momentum[name]))",
        "bytes/2",
    ),
    "momentum of its own rows": (
        "zero1_step",
        "lax.psum_scatter(grads[name], axis, tiled=True)",
        "lax.dynamic_slice_in_dim(grads[name], me * len(momentum[name]), len(momentum[name]))",
        "value/2/params",
    ),
    "whole weights kept for backward": ("zero3_step", "    @jax.checkpoint\n", "", "memory/2"),
    "no transpose": ("column_row_mlp", "lax.psum(dx, axis)", "dx", "value/2/dx"),
    "a mean over tp": ("column_row_mlp", "lax.psum(partial, axis)", "lax.pmean(partial, axis)", "value/2/y"),
    "gathered weights": ("column_row_mlp", None, GATHERED_WEIGHTS, "bytes/2"),
    "its own largest logit": ("vocabulary_loss", "lax.pmax(logits.max(-1), axis)", "logits.max(-1)", "value/2/loss"),
    "no largest logit": ("vocabulary_loss", "lax.pmax(logits.max(-1), axis)", "0 * logits[:, 0]", "value/2/loss"),
    "gathered logits": ("vocabulary_loss", None, GATHERED_LOGITS, "bytes/2"),
    "the norm's scale of its own tokens": (
        "sequence_parallel_mlp",
        "lax.psum(dscale, axis)",
        "dscale",
        "value/2/dscale",
    ),
    "an all-reduce, then its tokens": (
        "sequence_parallel_mlp",
        "lax.psum_scatter(hidden @ down, axis, tiled=True)",
        "lax.dynamic_slice_in_dim(lax.psum(hidden @ down, axis), lax.axis_index(axis) * len(x), len(x))",
        "bytes/2",
    ),
    "GPipe": ("one_f_one_b", "min(stages - stage, microbatches)", "microbatches", "in flight/2"),
    "one at a time": ("one_f_one_b", "min(stages - stage, microbatches)", "1", "bubble/2"),
    "backward first": ("one_f_one_b", 'f"B{m}", f"W{m}"', 'f"W{m}", f"B{m}"', "order/2"),
    "1F1B again": ("less_bubble", None, "less_bubble = one_f_one_b", "bubble/2"),
    "every W last": ("less_bubble", "m >= stage", "m < 0", "order/2"),
    "gathered keys": ("ring_attention", None, GATHERED_KEYS, "memory/2"),
    "gradients not sent home": (
        "ring_attention",
        "        dk, dv = onwards((dk, dv))",
        "        dk, dv = onwards((dk, dv)) if step < n - 1 else (dk, dv)",
        "value/2/dk",
    ),
    "positions of a rank": ("ring_attention", "(me - step) % n * length + place", "me * length + place", "value/2/o"),
    "parts not scaled": ("ring_attention", "o * jnp.exp(lse - both)", "o", "value/2/o"),
    "no scale": (
        "scaled_step",
        " * factor)(half)\n    grads = lax.psum(grads.astype(weights.dtype), axis) / scale",
        ")(half)\n    grads = lax.psum(grads.astype(weights.dtype), axis)",
        "value/2/weights",
    ),
    "divided in 16 bits": (
        "scaled_step",
        "lax.psum(grads.astype(weights.dtype), axis) / scale",
        "lax.psum((grads / factor).astype(weights.dtype), axis)",
        "value/2/weights",
    ),
    "each rank decides": (
        "scaled_step",
        "    finite = jnp.isfinite(grads).all()",
        "    finite = jnp.isfinite(jax.grad(lambda half: loss(half, batch) * factor)(half)).all()",
        "value/2/weights",
    ),
    "a scale that grows at every step": (
        "scaled_step",
        "jnp.where(good == 2, 2 * scale, scale)",
        "2 * scale",
        "value/2/scale",
    ),
    "an empty bucket before a large array": ("bucketed_sum", "buckets[-1] and sum(", "sum(", "raised"),
    "80 for the scores": (
        "activation_bytes",
        "5 * num_heads * seq_len / width",
        "80",
        "value//activation_bytes",
    ),
    "7 billion": ("state_bytes", "parameters / tp", "7e9 / tp", "value//state_bytes"),
    "ZeRO-2 for 3": ("state_bytes", "(3, 2, 1)", "(4, 2, 1)", "value//state_bytes"),
    "sp forgotten": ("activation_bytes", "tp if sp else 1", "1", "value//activation_bytes"),
    "a softmax over all experts": (
        "top2_experts",
        "jax.nn.softmax(scores)[:, :, None]",
        "jnp.take_along_axis(jax.nn.softmax(every_x @ router), chosen, 1)[:, :, None]",
        "value/2/y",
    ),
    "gates without a gradient": (
        "top2_experts",
        "jax.nn.softmax(scores)",
        "lax.stop_gradient(jax.nn.softmax(scores))",
        "value/2/dx",
    ),
    "a capacity": (
        "top2_experts",
        "gates = (jax.nn.softmax(scores)[:, :, None] * is_chosen)",
        "gates = (jax.nn.softmax(scores)[:, :, None] * (is_chosen & (jnp.cumsum(is_chosen, 0) <= 5)))",
        "value/2/y",
    ),
    "the router of its own experts": ("top2_experts", "lax.psum(drouter, axis)", "drouter", "value/2/drouter"),
    "the norm of its columns": ("newton_schulz", "lax.psum((x * x).sum(), axis)", "(x * x).sum()", "value/2/x"),
    "a gathered matrix": (
        "newton_schulz",
        "a = lax.psum(x @ x.T, axis)",
        "whole = lax.all_gather(x, axis, axis=1, tiled=True)\n        a = whole @ whole.T",
        "bytes/2",
    ),
    "not written": ("newton_schulz", "    for _", "    raise NotImplementedError\n    for _", "raised"),
    "a shape of its own": ("newton_schulz", "    return x", "    return x.T", "shape/2/x"),
    "too few results": ("reduce_scatter", "return y, dx.reshape(x.shape)", "return y", "results"),
    "a loop without an end": (
        "newton_schulz",
        "    return x",
        "    return lax.while_loop(lambda x: x.sum() > 1e9, lambda x: x, x)",
        "endless",
    ),
    "a sum of some ranks": (
        "newton_schulz",
        "    return x",
        "    return lax.cond(lax.axis_index(axis) == 0, lambda x: x + 0 * lax.psum(x, axis), lambda x: x, x)",
        "endless",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_people_write_instead_is_refused_for_its_reason(name):
    task, old, new, why = WRONG[name]
    source = inspect.getsource(getattr(solutions, task))
    assert old is None or source.count(old) == 1
    fault = graded(task, new if old is None else source.replace(old, new))
    assert fault is not None
    assert "/".join((fault.reason, str(fault.ranks or ""), fault.result)).rstrip("/") == why, fault.text
    assert LIKE.get(name, "") in fault.likeness and "PyTreeDef" not in fault.text
    assert (fault.rank is not None) == bool(re.match("(value|in flight)/[234]", why))


def outcome(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        run_program(GradeFlags, main, "labs grade", [*args])
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, " ".join(captured.err.split())


def test_a_file_is_judged_and_what_passes_is_written_down(capsys, tmp_path):
    mine, results = tmp_path / "mine.py", tmp_path / "results.jsonl"
    text = "from experiments.labs.solutions import less_bubble\n\n\ndef one_f_one_b(p, m):\n    return 1 // 0\n"
    text += "import jax\n\nstate_bytes = jax.jit(lambda parameters, **setting: parameters)\n"  # no plain function
    mine.write_text(text, encoding="utf-8")
    code, out, _ = outcome(capsys, str(mine), "--out", str(results))
    assert code == 1 and re.search(r"one_f_one_b +refused", out) and re.search(r"less_bubble +right", out)
    assert "one_f_one_b: line 5: ZeroDivisionError" in out and re.search(r"state_bytes +refused", out)
    (line,) = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    assert line["task"] == "less_bubble" and line["% bubble"] == 12.5
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "a clock that would end the process later"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def all_reduce(x, axis)\n    return x\n", "line 1: SyntaxError"),
        ("import nothing_of_this_name\n", "line 1: ModuleNotFoundError"),
        ("x = 1\n\nraise SystemExit(3)\n", "line 3: SystemExit"),
        ("while True:\n    pass\n", "TimeoutError: it did not end"),
        ("def allreduce(x, axis):\n    return x\n", "must define one of mean_gradient, all_reduce,"),
        (None, "must be a Python file"),
    ],
)
def test_a_file_that_cannot_be_judged_is_one_sentence(capsys, monkeypatch, tmp_path, text, said):
    monkeypatch.setattr("experiments.labs.grade.SECONDS", 0.2)
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code, _, err = outcome(capsys, str(path))
    assert code == 2 and said in err, err


@pytest.mark.parametrize("name", [*TASKS, "zero", "pipelines"])
def test_a_template_is_the_signatures_and_docstrings_of_the_solutions(capsys, name):
    _, out, _ = outcome(capsys, "--template", name)
    names = {}
    exec(out, names)
    for task, each in TASKS.items():
        assert (task in names) == (name in (task, each.lab))
        if task in names:
            theirs, ours = names[task], getattr(solutions, task)
            assert inspect.signature(theirs) == inspect.signature(ours) and theirs.__doc__ == ours.__doc__
            with pytest.raises(NotImplementedError):
                theirs(*inspect.signature(ours).parameters)


def test_tasks_belong_to_labs_and_are_listed(capsys):
    assert {task.lab for task in TASKS.values()} <= {*COURSE}
    assert all(name in outcome(capsys)[1] for name in TASKS)


def test_a_template_of_nothing_is_refused(capsys):
    assert outcome(capsys, "--template", "nothing")[0] == outcome(capsys, "x.py", "--template", "zero")[0] == 2
