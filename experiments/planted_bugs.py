"""Plant a bug, run the tests that should see it, expect red. Prints the score.

python -m experiments.planted_bugs [--only TEXT]

Each bug is one replacement in a copy of the source tree; the tests run there, so the checkout is never touched. The
tests that must catch the bugs are first run on the untouched copy and must be green.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.cli import run_program
from jaxdist.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("jaxdist", "experiments", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Bug:
    """Replace `old` (which stands exactly once) by `new` in `path`; `tests` are the strategies or tests that see it."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


PARITY = "tests/test_parity.py::test_every_strategy_equals_one_device[{}]"
PROGRAM = "tests/test_program.py::test_exactly_the_promised_collectives[{}]"
ORACLE = "tests/test_parity.py::test_one_device_equals_plain_jnp[float32]"
ORACLE_64 = "tests/test_parity.py::test_one_device_equals_plain_jnp[float64]"

BUGS = [
    Bug(
        "gradient reduction dropped",
        "jaxdist/parallel/data.py",
        "    arrays = all_reduce_groups(arrays, leaves, lambda leaf: leaf.shard_reduce_axes, layout.parallel)\n",
        "",
        (PARITY.format("dp2"),),
    ),
    Bug(
        "gradient reduction doubled",
        "jaxdist/parallel/grouping.py",
        "flat = comm.all_reduce(jnp.concatenate([arrays[i].reshape(-1) for i in members]), axes)",
        "flat = comm.all_reduce(jnp.concatenate([arrays[i].reshape(-1) for i in members]), axes)\n"
        "        flat = comm.all_reduce(comm.varying(flat, axes), axes)",
        (PARITY.format("dp2"),),
    ),
    Bug(
        "gradient reduction over the wrong axis",
        "jaxdist/parallel/data.py",
        'arrays = reduce_scatter_groups(arrays, leaves, "dp", layout.parallel)',
        'arrays = reduce_scatter_groups(arrays, leaves, "replica", layout.parallel)',
        (PARITY.format("replica2-dp4-zero1"),),
    ),
    Bug(
        "replica axis left out of the sum",
        "jaxdist/layout.py",
        "    axes = DATA_AXES + ",
        '    axes = ("dp",) + ',
        (PARITY.format("replica2-dp4"), PROGRAM.format("replica2-dp4")),
    ),
    Bug(
        "division by the token count missing",
        "jaxdist/step.py",
        "weight=scale / num_tokens)",
        "weight=scale * jnp.ones_like(num_tokens))",
        (ORACLE,),
    ),
    Bug(
        "extra division by the number of data ranks",
        "jaxdist/step.py",
        "grads = jax.tree.map(lambda g: g / scale, grads)",
        "grads = jax.tree.map(lambda g: g / scale / comm.size(DATA_AXES), grads)",
        (PARITY.format("dp2"),),
    ),
    Bug(
        "mean of the ranks' means",
        "jaxdist/step.py",
        "weight=scale / num_tokens)",
        "weight=scale / jnp.sum(batch.targets >= 0) / comm.size(DATA_AXES))",
        (PARITY.format("dp2"),),
    ),
    Bug(
        "loss averaged over ranks instead of tokens",
        "jaxdist/step.py",
        "loss = comm.all_reduce(loss_sum, DATA_AXES) / num_tokens",
        "loss = comm.all_reduce(loss_sum / jnp.sum(batch.targets >= 0), DATA_AXES) / comm.size(DATA_AXES)",
        (PARITY.format("dp2"),),
    ),
    Bug(
        "clipping by the local shard's norm",
        "jaxdist/optimizer.py",
        "sum(comm.all_reduce(total, axes) for axes, total in sums.items())",
        "sum(comm.all_reduce(total, axes) / comm.size(axes) for axes, total in sums.items())",
        (PARITY.format("dp2-tp2-zero2-clipped"),),
    ),
    Bug(
        "replicated leaves counted by every rank in the norm",
        "jaxdist/optimizer.py",
        "sum(comm.all_reduce(total, axes) for axes, total in sums.items())",
        'sum(comm.all_reduce(comm.varying(total, "tp"), {*axes, "tp"}) for axes, total in sums.items())',
        (PARITY.format("dp2-tp2"),),
    ),
    Bug(
        "gradient left scaled (fp16)",
        "jaxdist/step.py",
        "grads = jax.tree.map(lambda g: g / scale, grads)",
        "grads = jax.tree.map(lambda g: g * 1, grads)",
        ("tests/test_precision.py::test_fp16_gradients_are_unscaled",),
    ),
    Bug(
        "overflow skips the parameters but not the moments",
        "jaxdist/step.py",
        "(updated, moments), (owned, state.moments)",
        "(updated, moments), (owned, moments)",
        ("tests/test_precision.py::test_overflow_skips_the_update_on_every_rank",),
    ),
    Bug(
        "wrong vocabulary offset in the embedding",
        "jaxdist/parallel/tensor.py",
        "    local_BT = tokens_BT - comm.rank(AXIS) * table_VD.shape[0]\n    owned_BT = (local_BT >= 0) & (local_BT < "
        "table_VD.shape[0])\n    rows",
        "    local_BT = tokens_BT - (comm.size(AXIS) - 1 - comm.rank(AXIS)) * table_VD.shape[0]\n    owned_BT = "
        "(local_BT >= 0) & (local_BT < table_VD.shape[0])\n    rows",
        (PARITY.format("tp2"),),
    ),
    Bug(
        "targets looked up without their vocabulary offset",
        "jaxdist/parallel/tensor.py",
        "local_BT = targets_BT - comm.rank(AXIS) * table_VD.shape[0]",
        "local_BT = comm.varying(targets_BT, AXIS)",
        (PARITY.format("tp2"),),
    ),
    Bug(
        "padded logits counted",
        "jaxdist/parallel/tensor.py",
        "columns_V < vocab_size",
        "columns_V < 10 * vocab_size",
        (ORACLE, "tests/test_parity.py::test_padded_vocabulary_never_counts"),
    ),
    Bug(
        "padding masked by the local column",
        "jaxdist/parallel/tensor.py",
        "columns_V = global_indices(table_VD.shape[0])",
        "columns_V = comm.varying(jnp.arange(table_VD.shape[0]), AXIS)",
        ("tests/test_parity.py::test_padded_vocabulary_never_counts",),
    ),
    Bug(
        "dropout keyed on the local row",
        "jaxdist/step.py",
        "noise = model.Noise(config.model.dropout, key, micro.rows)",
        "noise = model.Noise(config.model.dropout, key, jnp.arange(micro.rows.shape[0]))",
        (PARITY.format("dp2-tp2-dropout"),),
    ),
    Bug(
        "attention dropout keyed on the local head",
        "jaxdist/model.py",
        "self.rows_B, global_indices(probs_BNTS.shape[1]))",
        "self.rows_B, jnp.arange(probs_BNTS.shape[1]))",
        (PARITY.format("dp2-tp2-dropout"),),
    ),
    Bug(
        "hidden dropout keyed on the local position",
        "jaxdist/model.py",
        "self.rows_B, positions(x_BTD.shape[1], sp))",
        "self.rows_B, jnp.arange(x_BTD.shape[1]))",
        (PARITY.format("dp2-tp4-sp-zero1-dropout"),),
    ),
    Bug(
        "the same dropout mask at every step",
        "jaxdist/step.py",
        "random.fold_in(random.key(config.seed), state.step)",
        "random.key(config.seed)",
        ("tests/test_parity.py::test_dropout_is_the_same_function_of_the_token_on_every_mesh_and_differs_by_step",),
    ),
    Bug(
        "rank 0's shard updated on every rank",
        "jaxdist/parallel/grouping.py",
        'comm.rank("dp") * num_rows',
        'comm.varying(jnp.int32(0), "dp")',
        (PARITY.format("dp8-zero1"),),
    ),
    Bug(
        "last micro-batch forgotten",
        "jaxdist/step.py",
        "return lax.scan(body, start, micros)[0]",
        "return lax.scan(body, start, jax.tree.map(lambda x: x[:-1], micros))[0]",
        (PARITY.format("accumulate"),),
    ),
    Bug(
        "micro-batch gradients not added up (stale sum)",
        "jaxdist/step.py",
        "lambda total, g: total + g.astype(total.dtype), carry[0], grads",
        "lambda total, g: g.astype(total.dtype), carry[0], grads",
        (PARITY.format("accumulate"),),
    ),
    Bug(
        "reduction inside the micro-batch loop",
        "jaxdist/step.py",
        "return jax.tree.map(lambda leaf, x: comm.varying(x, leaf.reduce_axes), layout.leaves, tree)",
        "return tree",
        (PARITY.format("dp4-accumulate"), PROGRAM.format("dp4-accumulate")),
    ),
    Bug(
        "positions of the first rank on every rank (sp)",
        "jaxdist/model.py",
        "here_T = positions(x_BTD.shape[1], run.sp)",
        "here_T = positions(x_BTD.shape[1], False)",
        (PARITY.format("tp4-sp"),),
    ),
    Bug(
        "row-parallel bias added before the sum",
        "jaxdist/model.py",
        "return leave(linear(h_BTF, self.w_down[...]), run.sp) + self.b_down[...]",
        "return leave(linear(h_BTF, self.w_down[...]) + self.b_down[...], run.sp)",
        (PARITY.format("tp2"),),
    ),
    Bug(
        "QKV split across the head dim",
        "jaxdist/model.py",
        '(None, None, "tp", None), decay=True)',
        '(None, None, None, "tp"), decay=True)',
        (PARITY.format("tp2"),),
    ),
    Bug(
        "parameters gathered from before the update (ZeRO-1)",
        "jaxdist/step.py",
        "params=gather_parameters(params, layout)",
        "params=gather_parameters(jax.tree.map(lambda p: p.astype(config.precision.dtype), owned), layout)",
        (PARITY.format("dp8-zero1"),),
    ),
    Bug(
        "masters not updated (bf16)",
        "jaxdist/step.py",
        "master=None if state.master is None else updated,",
        "master=state.master,",
        ("tests/test_precision.py::test_masters_keep_what_bf16_would_lose",),
    ),
    Bug(
        "gathered shards in the wrong order",
        "jaxdist/parallel/grouping.py",
        "rows = comm.all_gather(flat, axis, 0, replicated=replicated)",
        "rows = comm.all_gather(flat, axis, 0, replicated=replicated)[::-1]",
        (PARITY.format("dp8-zero3"),),
    ),
    Bug(
        "gathered weights kept for backward (ZeRO-3)",
        "jaxdist/model.py",
        "    return not _only_moves(primitive.name, params)",
        "    return True",
        (PROGRAM.format("dp8-zero3"), "tests/test_program.py::test_zero3_keeps_no_gathered_weight"),
    ),
    Bug(
        "weight decay on biases and norms",
        "jaxdist/optimizer.py",
        "lambda leaf: leaf.decay, layout.leaves",
        "lambda leaf: True, layout.leaves",
        (ORACLE_64,),
    ),
    Bug(
        "decoupled decay forgotten",
        "jaxdist/optimizer.py",
        "optax.chain(rule, optax.add_decayed_weights(config.weight_decay, decay_mask))",
        "optax.chain(rule)",
        (ORACLE_64,),
    ),
    Bug(
        "causal mask off by one",
        "jaxdist/model.py",
        "jnp.arange(length)[:, None] >= jnp.arange(length)",
        "jnp.arange(length)[:, None] + 1 >= jnp.arange(length)",
        (ORACLE,),
    ),
]


@dataclass(frozen=True)
class BugFlags:
    """Plant every bug of the list in a copy of the source and count how many the tests catch."""

    only: str = ""
    """Run the bugs whose name contains this text."""


def main(flags: BugFlags, console: Console) -> int:
    bugs = [bug for bug in BUGS if flags.only in bug.name]
    if not bugs:
        raise ConfigError(f"--only {flags.only}", "no bug has that in its name", "Try --only dropout")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)

        every_test = sorted({test for bug in bugs for test in bug.tests})
        with console.status("the untouched copy must be green"):
            green, output = run_tests(copy, every_test)
        if not green:
            console.print(output, markup=False)
            raise RuntimeError("the tests fail without any bug planted: see above")
        console.print(f"{len(every_test)} tests are green on the untouched copy")

        table = Table("bug", "file", "verdict", box=None, header_style="bold", pad_edge=False)
        caught = 0
        for bug in bugs:
            with console.status(f"{bug.name} ({caught} of {len(bugs)} caught so far)"):
                was_caught = is_caught(copy, bug)
            caught += was_caught
            verdict = "[green]caught[/]" if was_caught else "[bold red]NOT CAUGHT[/]"
            table.add_row(bug.name, bug.path, verdict)
            if not console.is_terminal:
                console.print(f"{'caught' if was_caught else 'NOT CAUGHT'}  {bug.name}")
    console.print(table)
    console.print(f"{caught} of {len(bugs)} planted bugs turn the tests red")
    return 0 if caught == len(bugs) else 1


def is_caught(copy: Path, bug: Bug) -> bool:
    """Plant one bug in the copy, run its tests, take it out again."""
    path = copy / bug.path
    text = path.read_text(encoding="utf-8")
    path.write_text(planted(bug, text), encoding="utf-8")
    try:
        return any(not run_tests(copy, [test])[0] for test in bug.tests)
    finally:
        path.write_text(text, encoding="utf-8")


def planted(bug: Bug, text: str) -> str:
    """The source with the bug in it. Raises: ValueError where the text to replace does not stand exactly once."""
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: the text to replace stands {text.count(bug.old)} times in {bug.path}, not once.")
    return text.replace(bug.old, bug.new)


def run_tests(folder: Path, tests: list[str]) -> tuple[bool, str]:
    """(all passed, output). A run that collects no test is an error, not a catch."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run {tests}:\n{done.stdout}\n{done.stderr}")
    return done.returncode == 0, done.stdout


if __name__ == "__main__":
    run_program(BugFlags, main, "experiments.planted_bugs")
