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

from jaxdist.errors import ConfigError

from .cli import run_program
from .tables import Rows

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
ORACLE = "tests/test_oracle.py::test_a_run_equals_plain_jnp[{}]"
SENT = "tests/test_communication.py::test_every_strategy_sends_what_is_predicted[{}]"
ORDER = "tests/test_order.py::{}"
SIXTEEN = "tests/test_sixteen_bits.py::{}"
CONFIG = "tests/test_config_and_layout.py::{}"
VERIFY = "tests/test_verify.py::{}"
DATA = "tests/test_data.py::{}"
PREFETCH = "tests/test_prefetch.py::{}"
PREPARE = "tests/test_prepare.py::{}"
LEVELS = "tests/test_levels.py::{}"
SEARCH = "tests/test_search.py::{}"
PLAN = "tests/test_plan_cli.py::{}"
BUDGET = "tests/test_budget.py::{}"
FORMULAS = "tests/test_formulas.py::{}"
LAWS = "tests/test_calibration.py::{}"
EXECUTED = "tests/test_levels.py::test_a_step_runs_every_collective_as_often_as_it_is_counted[{}]"
UNEVEN_V = "tests/test_pipeline.py::test_uneven_parts_with_tied_weights_tp_and_recomputation[zb-v-parts2-0]"
RINGS = "tests/test_rings.py::test_a_ring_{}"
CHECKPOINT = "tests/test_checkpoint.py::{}"
EXACT = CHECKPOINT.format("test_continued_run_equals_the_uninterrupted_one_bit_for_bit[{}]")
HEALTH = "tests/test_health.py::{}"

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
        "(overlap) the first layer's gradient, last of all, not reduced",
        "jaxdist/parallel/overlap.py",
        "    out = take(carry.pending, 0, carry.layers)\n",
        "    out = carry.layers\n",
        (PARITY.format("dp8-overlap"), SENT.format("dp8-zero2-overlap")),
    ),
    Bug(
        "(overlap) a gradient that waits taken for the next layer's",
        "jaxdist/parallel/overlap.py",
        "take(carry.pending, index + 1, carry.layers)",
        "take(carry.pending, index, carry.layers)",
        (PARITY.format("dp8-zero1-overlap"),),
    ),
    Bug(
        "(overlap) forward gathers the layer it is at",
        "jaxdist/parallel/overlap.py",
        "coming = ahead(index + 1)",
        "coming = ahead(index)",
        (PARITY.format("dp8-zero3-overlap"),),
    ),
    Bug(
        "(overlap) backward gathers the layer it is at",
        "jaxdist/parallel/overlap.py",
        "ahead(index - 1, after=carry.dx)",
        "ahead(index, after=carry.dx)",
        (PARITY.format("dp4-zero3-overlap-remat-block"),),
    ),
    Bug(
        "(overlap) the micro-batches before the last left out",
        "jaxdist/step.py",
        "        total = total if summed is None else add(pick(summed.layers, index), total)\n",
        "",
        (PARITY.format("dp4-overlap-accumulate"),),
    ),
    Bug(
        "replica axis left out of the sum",
        "jaxdist/layout.py",
        '    axes = ("pp", *DATA_AXES) + ',
        '    axes = ("pp", "dp") + ',
        (PARITY.format("replica2-dp4"), PROGRAM.format("replica2-dp4")),
    ),
    Bug(
        "division by the token count missing",
        "jaxdist/step.py",
        "weight=scale / num_tokens)",
        "weight=scale * jnp.ones_like(num_tokens))",
        (ORACLE.format("adamw-fp32"),),
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
        "loss = comm.all_reduce(loss_sum, LOSS_AXES) / num_tokens",
        "loss = comm.all_reduce(loss_sum / jnp.sum(batch.targets >= 0), LOSS_AXES) / comm.size(LOSS_AXES)",
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
        "jaxdist/optimizer.py",
        "betas if finite is True else (jnp.where(finite, beta, 1.0) for beta in betas)",
        "betas",
        ("tests/test_optimizer.py::test_a_gradient_that_is_not_finite_changes_no_bit",),
    ),
    Bug(
        "gradients of +0.0 where moments are frozen",
        "jaxdist/optimizer.py",
        "lambda g: jnp.where(finite, g, -0.0), grads)",
        "lambda g: jnp.where(finite, g, 0.0), grads)",
        ("tests/test_optimizer.py::test_a_gradient_that_is_not_finite_changes_no_bit",),
    ),
    Bug(
        "a block of queries that does not look at itself",
        "jaxdist/model.py",
        "k_BTNH[:, :end], v_BTNH[:, :end])",
        "k_BTNH[:, : max(end - rows, rows)], v_BTNH[:, : max(end - rows, rows)])",
        ("tests/test_attention.py::test_values_and_gradients_are_those_without_blocks",),
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
        "local_R = targets_R - comm.rank(AXIS) * table_VD.shape[0]",
        "local_R = comm.varying(targets_R, AXIS)",
        (PARITY.format("tp2"),),
    ),
    Bug(
        "padded logits counted",
        "jaxdist/parallel/tensor.py",
        "columns_V < vocab_size",
        "columns_V < 10 * vocab_size",
        (ORACLE.format("adamw-fp32"), "tests/test_parity.py::test_padded_vocabulary_never_counts"),
    ),
    Bug(
        "padding masked by the local column",
        "jaxdist/parallel/tensor.py",
        "columns_V = global_indices(table_VD.shape[0])",
        "columns_V = comm.varying(jnp.arange(table_VD.shape[0]), AXIS)",
        ("tests/test_parity.py::test_padded_vocabulary_never_counts",),
    ),
    Bug(
        "the table's gradient of the last chunk alone (chunks)",
        "jaxdist/parallel/tensor.py",
        "(loss + here, d_table + more.astype(wide))",
        "(loss + here, more.astype(wide))",
        (PARITY.format("loss-chunks-4"),),
    ),
    Bug(
        "ignored targets counted (chunks)",
        "jaxdist/parallel/tensor.py",
        "return jnp.where(targets_R >= 0, losses_R, 0).sum()",
        "return losses_R.sum()",
        (PARITY.format("loss-chunks-4"),),
    ),
    Bug(
        "the seed of half precision left in (chunks)",
        "jaxdist/parallel/tensor.py",
        "comm.varying_like(d_loss / seed, each)",
        "comm.varying_like(d_loss, each)",
        (PARITY.format("dp2-tp2-loss-chunks-fp16"),),
    ),
    Bug(
        "the factor of the loss forgotten (chunks)",
        "jaxdist/parallel/tensor.py",
        "comm.varying_like(d_loss / seed, each) * each",
        "each / seed",
        (PARITY.format("loss-chunks-4"),),
    ),
    Bug(
        "targets of other rows (chunks)",
        "jaxdist/parallel/tensor.py",
        "targets_CR = targets_BT.reshape(num_chunks, -1)",
        "targets_CR = targets_BT.reshape(-1, num_chunks).T",
        (PARITY.format("loss-chunks-4"),),
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
        "random.fold_in(random.key(config.seed), step)",
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
        "loss_sum = lax.scan(body, start, cut(batch, num_micro))[0]",
        "loss_sum = lax.scan(body, start, jax.tree.map(lambda x: x[:-1], cut(batch, num_micro)))[0]",
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
        "positions(length, run.sp)[0]",
        "positions(length, False)[0]",
        (PARITY.format("tp4-sp"),),
    ),
    Bug(
        "row-parallel bias added before the sum",
        "jaxdist/model.py",
        "self.w_down[...], run.sp, run.ring), self.b_down[...])",
        'self.w_down[...], run.sp, run.ring), lax.psum(lax.pcast(self.b_down[...], "tp", to="varying"), "tp"))',
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
        "jaxdist/parallel/remat.py",
        "            return not refetch and gathers_weights(name, params)",
        "            return True",
        (PROGRAM.format("dp8-zero3"), "tests/test_program.py::test_zero3_keeps_no_gathered_weight"),
    ),
    Bug(
        "weight decay on biases and norms",
        "jaxdist/optimizer.py",
        "lambda leaf: leaf.decay, layout.leaves",
        "lambda leaf: True, layout.leaves",
        (ORACLE.format("adamw-dropout"),),
    ),
    Bug(
        "decoupled decay forgotten",
        "jaxdist/optimizer.py",
        "optax.chain(rule, optax.add_decayed_weights(config.weight_decay, decay_mask))",
        "optax.chain(rule)",
        (ORACLE.format("adamw-dropout"),),
    ),
    Bug(
        "causal mask off by one",
        "jaxdist/model.py",
        "jnp.arange(length - rows, length)[:, None] >= jnp.arange(length)",
        "jnp.arange(length - rows, length)[:, None] + 1 >= jnp.arange(length)",
        (ORACLE.format("adamw-fp32"), "tests/test_attention.py::test_values_and_gradients_are_those_without_blocks"),
    ),
    Bug(
        "(pipeline) the embedding's sum does not depend on its loop, which the compiler then lifts it out of",
        "jaxdist/parallel/pipeline.py",
        "pick(self.micros, row.microbatch + index)",
        "pick(self.micros, row.microbatch)",
        (EXECUTED.format("pp=2,tp=2-more0"),),
    ),
    Bug(
        "(pipeline) nor does the gather of the embedding's output gradient",
        "jaxdist/parallel/pipeline.py",
        "pruned(gradient, self.shared, micro, dx)), jnp.zeros_like(dx)",
        "pruned(gradient, self.shared, micro, dx)), dx",
        (EXECUTED.format("pp=2,dp=2,tp=2-more1"),),
    ),
    Bug(
        "message read from another one's slot (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "out.slot_in[use_tick, receiver] = slot",
        "out.slot_in[use_tick, receiver] = slot - 1",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "message read a tick before its use (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "out.slot_in[use_tick, receiver] = slot",
        "out.slot_in[use_tick - 1, receiver] = slot",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "message put away a tick late (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "getattr(out, way)[arrives, receiver] = slot",
        "getattr(out, way)[arrives + 1, receiver] = slot",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "message put a slot off (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "put(messages, getattr(mine, name), arrived[name])",
        "put(messages, getattr(mine, name) + 1, arrived[name])",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "messages taken from the wrong side (pipeline)",
        "jaxdist/parallel/pipeline.py",
        '{"from_before": 1, "from_after": -1, ',
        '{"from_before": -1, "from_after": 1, ',
        (PARITY.format("pp4-zb-h1"),),
    ),
    Bug(
        "messages sent a tick late (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "np.roll(getattr(instructions, name) != NOWHERE, -shift, axis=1)",
        "np.roll(getattr(instructions, name) != NOWHERE, (1, -shift), axis=(0, 1))",
        (PARITY.format("pp4-zb-h1"),),
    ),
    Bug(
        "receivers taken for senders (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "np.roll(getattr(instructions, name) != NOWHERE, -shift, axis=1)",
        "(getattr(instructions, name) != NOWHERE)",
        (PARITY.format("pp4-zb-h1"),),
    ),
    Bug(
        "a message on its way used a tick early (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "arrives = tick if receiver == stage else tick + schedule.hop - 1",
        "arrives = tick",
        (PARITY.format("pp4-1f1b-overlap"),),
    ),
    Bug(
        "what a tick makes sent twice, what the last made never (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "leaving=None if self.hop == 1 else message)",
        "leaving=None if self.hop == 1 else arrived['from_before'])",
        (PARITY.format("pp4-1f1b-overlap"),),
    ),
    Bug(
        "a message between stages a tick early in the table (pipeline)",
        "jaxdist/parallel/schedules.py",
        'return tick + max(1, schedule.hop - (needed.kind == "W"))',
        "return tick + 1",
        ("tests/test_schedules.py::test_messages_that_travel_during_a_tick_are_a_tick_later",),
    ),
    Bug(
        "W entry a tick early (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "for reader in (tick, b_tick, w_tick):",
        "for reader in (tick, b_tick, w_tick - 1):",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "B with what another micro-batch kept (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "kept = load(state.until_b, row.slot_b, layer), load",
        "kept = load(state.until_b, 0, layer), load",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "W with what another micro-batch kept (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "if self.recompute_every else load(state.until_w, row.slot_w, layer)",
        "if self.recompute_every else load(state.until_w, 0, layer)",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "W with what another micro-batch handed over (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "for_w = load(state.handed, row.slot_h, layer)",
        "for_w = load(state.handed, 0, layer)",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "one message slot short (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "(max(lowered.num_messages, 1),)",
        "(max(lowered.num_messages - 1, 1),)",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "one slot until B short (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "lowered.num_until_b, split.until_b",
        "lowered.num_until_b - 1, split.until_b",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "one slot until W short (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "lowered.num_until_w, split.until_w",
        "lowered.num_until_w - 1, split.until_w",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "one handed slot short (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "lowered.num_handed, split.handed",
        "lowered.num_handed - 1, split.handed",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "one slot of group inputs short (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "lowered.num_until_b, [self.x]",
        "lowered.num_until_b - 1, [self.x]",
        (PARITY.format("pp2-remat-every-2-of-3"),),
    ),
    Bug(
        "one handed slot short with recomputation (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "lowered.num_handed, (*split.handed",
        "lowered.num_handed - 1, (*split.handed",
        (PARITY.format("pp2-remat-every-2-of-3"),),
    ),
    Bug(
        "message slot free a tick early (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "if busy < start:",
        "if busy <= start:",
        (PARITY.format("pp4-zb-h1"),),
    ),
    Bug(
        "slot until W free after B (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "until_w[stage].take(tick, w_tick)",
        "until_w[stage].take(tick, b_tick)",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "handed slot free at once (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "handed[stage].take(tick, w_tick)",
        "handed[stage].take(tick, tick)",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "another chunk's weights (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "return pick((self.layers, self.fixed), row.chunk * self.depth + layer)",
        "return pick((self.layers, self.fixed), (len(self.counts) - 1 - row.chunk) * self.depth + layer)",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "chunks of a stage swapped in the table (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "chunk = schedule.place(part)[1]",
        "chunk = schedule.num_chunks - 1 - schedule.place(part)[1]",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "gradient added to another chunk's layers (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "at = row.chunk * self.depth + layer",
        "at = layer",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "V's second chunk numbered downwards (pipeline)",
        "jaxdist/layout.py",
        "part = schedule.part(stage, chunk)",
        "part = chunk * schedule.num_stages + stage",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "V's layer counts numbered downwards (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "[num_layers[schedule.part(stage, chunk)] for",
        "[num_layers[chunk * schedule.num_stages + stage] for",
        (UNEVEN_V,),
    ),
    Bug(
        "layers of a part upside down (pipeline)",
        "jaxdist/layout.py",
        "starts[part] + row if row < part_layers[part]",
        "starts[part + 1] - 1 - row if row < part_layers[part]",
        (PARITY.format("pp2-gpipe"),),
    ),
    Bug(
        "padding rows before the layers (pipeline)",
        "jaxdist/layout.py",
        "rows += [starts[part] + row if row < part_layers[part] else -1 for row in range(depth)]",
        "rows += [-1] * (depth - part_layers[part]) + list(range(starts[part], starts[part + 1]))",
        (PARITY.format("pp4-uneven"),),
    ),
    Bug(
        "padding rows trained (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "counts=counts_of(schedule, num_layers, axis)",
        "counts=counts_of(schedule, [depth] * schedule.num_parts, axis)",
        (PARITY.format("pp4-uneven"),),
    ),
    Bug(
        "layers given back in the stages' order (pipeline)",
        "jaxdist/parallel/relayout.py",
        "_reorder(x, np.reshape(leaf.rows, (leaf.pp, -1)), leaf.logical_rows)",
        "x[: leaf.logical_rows.shape[1]]",
        (PARITY.format("pp2-zb-v"),),
    ),
    Bug(
        "B in the order of F (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "            return dx, store(handed, row.slot_h, layer, for_w)\n\n        carry = (value, state.handed)\n"
        '        value, handed = self.for_layers("layers_input_gradient", row, INPUT_GRADIENT, body, carry, '
        "reverse=True)",
        "            return dx, store(handed, row.slot_h, layer, for_w)\n\n        carry = (value, state.handed)\n"
        '        value, handed = self.for_layers("layers_input_gradient", row, INPUT_GRADIENT, body, carry)',
        (PARITY.format("pp2-gpipe"),),
    ),
    Bug(
        "gradient of the last micro-batch alone (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "total = add(pick(d_layers, at), dw)",
        "total = jax.tree.map(lambda sums, x: x.astype(sums.dtype), pick(d_layers, at), dw)",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "embedding on every stage (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "at_work = (row.kind == FORWARD) & (row.first == 1)",
        "at_work = row.kind == FORWARD",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "head on the last chunk of every stage (pipeline)",
        "jaxdist/parallel/pipeline.py",
        '("last", part == final)',
        '("last", chunk == schedule.num_chunks - 1)',
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "loss of the last micro-batch alone (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "return add(d_shared, d_here), loss + here, dy",
        "return add(d_shared, d_here), here, dy",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "evaluated loss of the last micro-batch alone (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "lambda loss: loss + self.stages.last(self.shared, value, micro)",
        "lambda loss: self.stages.last(self.shared, value, micro)",
        (UNEVEN_V,),
    ),
    Bug(
        "loss seed left out (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "pull(comm.varying_like(seed.astype(here.dtype), here))",
        "pull(comm.varying_like(jnp.ones_like(here), here))",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "weight of the loss left out (pipeline)",
        "jaxdist/step.py",
        "dict(seed=weight, ",
        "dict(",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "loss not summed over the stages (pipeline)",
        "jaxdist/step.py",
        'LOSS_AXES = ("pp", *DATA_AXES)',
        "LOSS_AXES = DATA_AXES",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "loss averaged over the stages (pipeline)",
        "jaxdist/step.py",
        "loss = comm.all_reduce(loss_sum, LOSS_AXES) / num_tokens",
        'loss = comm.all_reduce(loss_sum, LOSS_AXES) / comm.size("pp") / num_tokens',
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "evaluated loss averaged over the stages (pipeline)",
        "jaxdist/step.py",
        "return comm.all_reduce(total, LOSS_AXES), count",
        'return comm.all_reduce(total, LOSS_AXES) / comm.size("pp"), count',
        ("tests/test_parity.py::test_a_pipeline_evaluates_what_one_device_evaluates[pp2-interleaved]",),
    ),
    Bug(
        "gradients summed in 16 bits (pipeline)",
        "jaxdist/step.py",
        "recompute_every=run.remat_every, dtype=config.precision.master_dtype)",
        "recompute_every=run.remat_every, dtype=None)",
        ("tests/test_precision.py::test_gradients_keep_the_precision_of_the_reduction[pp2-gpipe]",),
    ),
    Bug(
        "what B hands to W taken in another order (pipeline)",
        "jaxdist/parallel/split.py",
        "known |= zip(handed_vars, from_b, strict=True)",
        "known |= zip(handed_vars[1::-1] + handed_vars[2:], from_b, strict=True)",
        ("tests/test_pipeline.py::test_b_and_w_together_are_the_gradient",),
    ),
    Bug(
        "what a residual is made of again not kept whole (pipeline)",
        "jaxdist/parallel/split.py",
        "kept = (kept - set(made)) | inputs",
        "kept = kept - set(made)",
        (
            "tests/test_pipeline.py::test_a_tensor_parallel_block_splits_8_matmuls_to_b_and_4_to_w_and_its_sums_stay_in_b",
        ),
    ),
    Bug(
        "norm averaged over the stages (pipeline)",
        "jaxdist/optimizer.py",
        "sum(comm.all_reduce(total, axes) for axes, total in sums.items())",
        'sum(comm.all_reduce(total, axes) / comm.size({*axes} & {"pp"}) for axes, total in sums.items())',
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "embedding's half of the tied gradient lost (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "return add(d_shared, pruned(gradient, self.shared, micro, dx)), jnp.zeros_like(dx)",
        "return d_shared, jnp.zeros_like(dx)",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "head's half of the tied gradient lost (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "return add(d_shared, d_here), loss + here, dy",
        "return d_shared, loss + here, dy",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "embedding gradient added twice (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "return add(d_shared, pruned(gradient, self.shared, micro, dx))",
        "return add(d_shared, pruned(gradient, self.shared, micro, 2 * dx))",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "embedding gradient added on the last stage too (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "at_work = (row.kind == INPUT_GRADIENT) & (row.first == 1)",
        "at_work = (row.kind == INPUT_GRADIENT) & (row.first + row.last == 1)",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "embedding gradient added in W too (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "at_work = (row.kind == INPUT_GRADIENT) & (row.first == 1)",
        "at_work = (row.kind >= INPUT_GRADIENT) & (row.first == 1)",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "embedding gradient given to another micro-batch's tokens (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "pruned(gradient, self.shared, micro, dx)",
        "pruned(gradient, self.shared, pick(self.micros, 0), dx)",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "tied gradient summed over the stages twice (pipeline)",
        "jaxdist/step.py",
        "return {**d_root, STACKED: d_blocks}, loss",
        'd_root = comm.varying(jax.tree.map(lambda g: comm.all_reduce(g, "pp"), d_root), "pp")\n'
        "    return {**d_root, STACKED: d_blocks}, loss",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "tied gradient of the first stage alone (pipeline)",
        "jaxdist/step.py",
        "return {**d_root, STACKED: d_blocks}, loss",
        'd_root = jax.tree.map(lambda g: jnp.where(comm.rank("pp") == 0, g, 0), d_root)\n'
        "    return {**d_root, STACKED: d_blocks}, loss",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "tied gradient not summed over the stages (pipeline)",
        "jaxdist/layout.py",
        '    axes = ("pp", *DATA_AXES) + ',
        "    axes = DATA_AXES + ",
        (PARITY.format("pp2-interleaved"),),
    ),
    Bug(
        "group recomputed from the first group's input (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "[x] = load(state.until_b, row.slot_b, group)",
        "[x] = load(state.until_b, row.slot_b, 0)",
        (PARITY.format("pp2-remat-every-2-of-3"),),
    ),
    Bug(
        "last group of layers too long (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "return first, jnp.minimum(self.recompute_every, self.counts[row.chunk] - first)",
        "return first, jnp.int32(self.recompute_every)",
        (PARITY.format("pp2-remat-every-2-of-3"),),
    ),
    Bug(
        "handed over at the layer's place in its group (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "store(handed, row.slot_h, first + index, ",
        "store(handed, row.slot_h, index, ",
        (PARITY.format("pp2-remat-every-2-of-3"),),
    ),
    Bug(
        "groups' backward in the order of forward (pipeline)",
        "jaxdist/parallel/pipeline.py",
        "body, (value, state.handed), reverse=True)",
        "body, (value, state.handed))",
        (PARITY.format("pp2-remat-every-2-of-3"),),
    ),
    Bug(
        "dropout keyed on the layer's place in its stage (pipeline)",
        "jaxdist/step.py",
        'layers = comm.varying(jnp.asarray(rows).reshape(layout.parallel.mesh.pp, -1), "pp")[comm.rank("pp")]',
        "layers = jnp.arange(len(rows) // layout.parallel.mesh.pp)",
        (PARITY.format("pp2-tp4-sp-dropout"),),
    ),
    Bug(
        "dropout keyed on the micro-batch's row (pipeline)",
        "jaxdist/step.py",
        "return model.Noise(config.model.dropout, key, micro.rows)",
        "return model.Noise(config.model.dropout, key, jnp.arange(micro.rows.shape[0]))",
        (PARITY.format("pp2-tp4-sp-dropout"),),
    ),
    Bug(
        "the head's weight gradient left for later",
        "jaxdist/parallel/tensor.py",
        "x_BTD, table_VD = gradients_together(x_BTD, comm.varying(table_VD, AXIS))",
        "table_VD = comm.varying(table_VD, AXIS)",
        ("tests/test_program.py::test_the_heads_weight_gradient_does_not_wait_for_the_layers[tp4-sp]",),
    ),
    # What a plan predicts: what a step sends, then memory, the compiled text, the search, money, time.
    Bug(
        "gradients without ZeRO's padding (plan)",
        "jaxdist/plan/communication.py",
        "sizes = [math.prod(leaf.storage_local) * leaf.dp * itemsize for leaf in leaves]",
        "sizes = [math.prod(leaf.compute_local) * itemsize for leaf in leaves]",
        (SENT.format("dp3-zero3-padded"),),
    ),
    Bug(
        "weights gathered in fp32 (plan)",
        "jaxdist/plan/communication.py",
        'return self.over_dp(purpose, "all_gather", leaves, times, self.item, wanted or every_leaf)',
        'return self.over_dp(purpose, "all_gather", leaves, times, self.master, wanted or every_leaf)',
        (SENT.format("dp4-tp2-sp-zero3-bf16"),),
    ),
    Bug(
        "a recomputed block's second sum sent again (plan)",
        "jaxdist/plan/communication.py",
        "return 2, 1 if self.parallel.remat_every == 1 else 2",
        "return 2, 2",
        (SENT.format("dp4-tp2-zero3-dropout-remat"),),
    ),
    Bug(
        "parts of a shared table in the wrong order (pipeline)",
        "jaxdist/parallel/collectives.py",
        "whole = put(whole, part, (rank(axis) + step) % n)",
        "whole = put(whole, part, (rank(axis) - step) % n)",
        (PARITY.format("pp4-1f1b"),),
    ),
    Bug(
        "one end's gradient of a shared table lost (pipeline)",
        "jaxdist/parallel/collectives.py",
        "for sender in ranks])",
        "for sender in ranks[:1]])",
        (PARITY.format("pp4-1f1b"), PARITY.format("pp2-gpipe")),
    ),
    Bug(
        "a shared table's gradient scattered from the wrong parts (pipeline)",
        "jaxdist/parallel/collectives.py",
        "sent = part_of((rank(axis) + step) % n)",
        "sent = part_of(rank(axis))",
        (PARITY.format("pp2-gpipe"),),
    ),
    Bug(
        "a shared table given to the wrong stage (pipeline)",
        "jaxdist/layout.py",
        "for part in (0, len(part_layers) - 1)",
        "for part in (0, len(part_layers) - 2)",
        (PARITY.format("pp4-1f1b"),),
    ),
    Bug(
        "a table's parts to both ends from both ends (plan)",
        "jaxdist/plan/communication.py",
        "to_ends, back = len(leaf.users) - an_end,",
        "to_ends, back = len(leaf.users),",
        (SENT.format("pp4-1f1b"),),
    ),
    Bug(
        "the middle stages send a table's gradient (plan)",
        "jaxdist/plan/trace.py",
        "count = count * np.isin(np.arange(mesh.pp), senders).astype(int)",
        "count = count * np.ones(mesh.pp, int)",
        (SENT.format("pp4-1f1b"),),
    ),
    Bug(
        "the embedding on every stage (plan)",
        "jaxdist/parallel/pipeline.py",
        "schedule.num_microbatches * (schedule.place(part)[0] == stage)",
        "schedule.num_microbatches * (stage >= 0)",
        (
            "tests/test_bench.py::test_a_pipeline_holds_less_than_the_papers_say_and_sends_what_that_takes[pp2-tp4-sp-dropout]",
        ),
    ),
    Bug(
        "a tied table's gradient lost (ZeRO-3)",
        "jaxdist/step.py",
        "pairs = ((make_whole_holders(root, layout, *dtypes)(root_holders), block_holders), split_root(held))",
        "whole = make_whole_holders(root, layout, *dtypes)(root_holders)\n        "
        'pairs = (({**whole, "tokens": lax.stop_gradient(whole["tokens"])}, block_holders), split_root(held))',
        (PARITY.format("dp8-zero3"),),
    ),
    Bug(
        "a transposed matrix taken for a copy (plan)",
        "jaxdist/plan/memory.py",
        "return is_matrix and all(",
        "return not is_matrix and all(",
        (LEVELS.format("test_a_matmul_reads_a_transposed_matrix_as_it_is"),),
    ),
    Bug(
        "a gradient waits beside the sum over micro-batches (plan)",
        "jaxdist/plan/memory.py",
        "self.ops.insert(self.ops.index(made) + 1, early)",
        "self.ops.insert(self.ops.index(op), early)",
        (LEVELS.format("test_a_scattered_gradient_is_added_to_the_sum_where_it_is_made"),),
    ),
    Bug(
        "messages between stages at every tick (plan)",
        "jaxdist/plan/communication.py",
        '"to the one before": "from_after_"}',
        '"to the one before": "from_"}',
        (SENT.format("pp4-1f1b"),),
    ),
    Bug(
        "uneven stages taken for even ones (plan)",
        "jaxdist/plan/communication.py",
        "once = runs_of(self.parallel.pipeline, config.part_layers)",
        "parts = self.parallel.pipeline.num_parts\n"
        "            once = runs_of(self.parallel.pipeline, (layers // parts,) * parts)",
        (SENT.format("interleaved-pp=2,tp=4-m4"),),
    ),
    # Data.
    Bug(
        "a value walked out of its epoch is taken modulo its size (data)",
        "jaxdist/order.py",
        "        walking = walking[values[walking] >= count]",
        "        values %= np.uint64(count)\n        walking = walking[:0]",
        (ORDER.format("test_shuffled_is_a_permutation"),),
    ),
    Bug(
        "every epoch in the same order (data)",
        "jaxdist/order.py",
        "np.random.SeedSequence([seed, source, epoch])",
        "np.random.SeedSequence([seed, source])",
        (ORDER.format("test_order_depends_on_seed_and_epoch_alone"),),
    ),
    Bug(
        "every source in the same order (data)",
        "jaxdist/order.py",
        "np.random.SeedSequence([seed, source, epoch])",
        "np.random.SeedSequence([seed, 0, epoch])",
        (ORDER.format("test_sources_are_not_shuffled_alike"),),
    ),
    Bug(
        "half of the rounds hash nothing (data)",
        "jaxdist/order.py",
        "right = (right + _hash(left, key) % np.uint64(b)) % np.uint64(b)",
        "right = (right + np.uint64(key) % np.uint64(b)) % np.uint64(b)",
        (
            ORDER.format("test_each_value_is_as_likely_at_each_place[50]"),
            ORDER.format("test_neighbours_in_a_large_epoch_are_unrelated"),
        ),
    ),
    Bug(
        "the largest source first, whatever its deadline (data)",
        "jaxdist/order.py",
        "source_at[place] = min(deadlines)[1]",
        "source_at[place] = max(deadlines, key=lambda each: shares[each[1]])[1]",
        (ORDER.format("test_shares_are_exact_up_to_rounding_after_every_sample"),),
    ),
    Bug(
        "rows counted from the share's start (data)",
        "jaxdist/data.py",
        "numbers = np.arange(*key)",
        "numbers = np.arange(len(range(*key)))",
        (ORDER.format("test_any_split_of_the_rows_reads_the_global_batch"),),
    ),
    Bug(
        "the last window left out (data)",
        "jaxdist/data.py",
        "return [max(len(source.train) - 1, 0) // self.seq_len for",
        "return [max(len(source.train) - 2, 0) // self.seq_len for",
        (ORDER.format("test_each_epoch_visits_each_window_once"),),
    ),
    Bug(
        "held-out data with the training data in it (data)",
        "jaxdist/tokens.py",
        "after.append(Part(part.array, part.path, middle, part.stop))",
        "after.append(Part(part.array, part.path, part.start, part.stop))",
        (DATA.format("test_text_file_holds_out_its_last_tenth"),),
    ),
    Bug(
        "tokens are checked when a file is opened, and then no more (data)",
        "jaxdist/tokens.py",
        "            check_vocabulary(piece, part, first, self.vocab_size)\n",
        "            if len(piece) == CHUNK:\n                check_vocabulary(piece, part, first, self.vocab_size)\n",
        (DATA.format("test_token_that_the_opening_did_not_see_never_reaches_the_model"),),
    ),
    Bug(
        "an error of the thread ends the data (data)",
        "jaxdist/prefetch.py",
        "            raise StopIteration\n",
        "            raise StopIteration\n        if self._ahead[0].exception():\n            raise StopIteration\n",
        (PREFETCH.format("test_an_error_comes_in_its_place_with_its_own_message"),),
    ),
    Bug(
        "a file has its name before it is whole (data)",
        "jaxdist/files.py",
        """    part = path.with_name(path.name + ".part")\n""",
        "    part = path\n",
        (PREPARE.format("test_killed_at_any_write_it_continues_to_the_same_bytes[half-written]"),),
    ),
    Bug(
        "a shard on the disk is taken for whole (data)",
        "experiments/prepare.py",
        'if not (done and (out / name).exists() and sha256_of(out / name) == done["sha256"]):',
        "if not (done and (out / name).exists()):",
        (PREPARE.format("test_a_shard_that_changed_since_is_made_again"),),
    ),
    Bug(
        "a shard's name may be any path (data)",
        "jaxdist/prepared.py",
        "            if shard.name != shard_name(split, number):",
        '            if not shard.name.endswith(".npy"):',
        (PREPARE.format("test_a_wrong_or_hostile_manifest_is_refused"),),
    ),
    Bug(
        "sizes of files are not compared (data)",
        "jaxdist/prepared.py",
        "    if size != file.num_bytes:",
        "    if size > file.num_bytes:",
        (PREPARE.format("test_cut_longer_or_deleted_files_are_refused_by_name"),),
    ),
    Bug(
        "a document ends at the text of a special token (data)",
        "jaxdist/tokenizer.py",
        "        self._inner.encode_special_tokens = True\n",
        "",
        (PREPARE.format("test_every_document_comes_back"),),
    ),
    Bug(
        "a character is cut between two pieces (data)",
        "experiments/prepare.py",
        "    return len(text) - back or len(text)",
        "    return len(text)",
        (PREPARE.format("test_units_and_pieces_cover_the_text"),),
    ),
    # Checkpoints, resuming, faults.
    Bug(
        "a flipped byte goes unseen (survive)",
        "jaxdist/checkpoint.py",
        "            if found_digest != digest:\n",
        "            if False:\n",
        (CHECKPOINT.format("test_a_damaged_file_is_named[flipped-3]"),),
    ),
    Bug(
        "a missing file goes unseen (survive)",
        "jaxdist/checkpoint.py",
        "        for name in sorted(manifest.files.keys() | found.keys()):\n",
        "        for name in sorted(found.keys()):\n",
        (CHECKPOINT.format("test_a_damaged_file_is_named[deleted-3]"),),
    ),
    Bug(
        "a link is followed (survive)",
        "jaxdist/checkpoint.py",
        "        if path.is_symlink() or not (path.is_file() or path.is_dir()):\n",
        "        if not (path.is_file() or path.is_dir()):\n",
        (CHECKPOINT.format("test_a_file_that_does_not_belong_is_named"),),
    ),
    Bug(
        "names lead out of the checkpoint (survive)",
        "jaxdist/checkpoint.py",
        '        if name.is_absolute() or ".." in name.parts:\n',
        "        if name.is_absolute():\n",
        (CHECKPOINT.format("test_a_foreign_or_hostile_manifest_is_refused"),),
    ),
    Bug(
        "a changed manifest is believed (survive)",
        "jaxdist/checkpoint.py",
        "    if content != _sealed(content):\n",
        "    if False:\n",
        (CHECKPOINT.format("test_a_foreign_or_hostile_manifest_is_refused"),),
    ),
    Bug(
        "the newest are removed, not the oldest (survive)",
        "jaxdist/checkpoint.py",
        "self.steps()[: -self.keep_last]",
        "self.steps()[self.keep_last :]",
        (CHECKPOINT.format("test_the_newest_and_every_tenth_are_kept"),),
    ),
    Bug(
        "arrays are restored whatever their shape (survive)",
        "jaxdist/checkpoint.py",
        "        require_same_arrays(folder, manifest, wanted)\n",
        "",
        (CHECKPOINT.format("test_arrays_of_another_shape_name_or_dtype_are_refused_before_anything_is_read"),),
    ),
    Bug(
        "moments start anew (survive)",
        "jaxdist/logical.py",
        "return fresh._replace(step=arrays[STEP], moments=moments, scale=scale)",
        "return fresh._replace(step=arrays[STEP], scale=scale)",
        (EXACT.format("one"),),
    ),
    Bug(
        "the step starts anew, and with it dropout (survive)",
        "jaxdist/logical.py",
        "return fresh._replace(step=arrays[STEP], moments=moments, scale=scale)",
        "return fresh._replace(moments=moments, scale=scale)",
        (EXACT.format("one"),),
    ),
    Bug(
        "the loss scale starts anew (survive)",
        "jaxdist/logical.py",
        "return fresh._replace(step=arrays[STEP], moments=moments, scale=scale)",
        "return fresh._replace(step=arrays[STEP], moments=moments)",
        (EXACT.format("dp2-fp16"),),
    ),
    Bug(
        "layers saved in the stages' order (survive)",
        "jaxdist/layout.py",
        "return self.compute_shape == self.shape and (self.rows is None or self.rows == tuple(range(self.shape[0])))",
        "return self.compute_shape == self.shape",
        (CONFIG.format("test_layers_change_stages_and_come_back"),),
    ),
    Bug(
        "the data starts anew (survive)",
        "jaxdist/resume.py",
        'progress = Progress(**manifest.about["progress"])',
        "progress = Progress()",
        (EXACT.format("one"),),
    ),
    Bug(
        "the rank is looked for after the sum (survive)",
        "jaxdist/step.py",
        "flag_not_finite(all_finite(loss_sum), finite_leaves)",
        "flag_not_finite(all_finite(loss_sum), all_finite(grads))",
        (HEALTH.format("test_one_bad_shard_is_named_and_changes_no_bit"),),
    ),
    Bug(
        "a checksum blind to order (survive)",
        "jaxdist/health.py",
        "return jnp.sum(bits * weights, dtype=jnp.uint32)",
        "return jnp.sum(bits, dtype=jnp.uint32)",
        (HEALTH.format("test_a_checksum_sees_every_flipped_bit_and_a_swap"),),
    ),
    Bug(
        "the majority is blamed (survive)",
        "jaxdist/health.py",
        "wrong[rank] = tied or sums[rank] != common",
        "wrong[rank] = tied or sums[rank] == common",
        (HEALTH.format("test_a_copy_that_differs_is_named"),),
    ),
    Bug(
        "a spike is remembered as normal (survive)",
        "jaxdist/health.py",
        "1.1 * max(expected, self.recent[-1])):\n                return True",
        "1.1 * max(expected, self.recent[-1])):\n                self.recent.append(loss)\n                return True",
        (HEALTH.format("test_a_spike_is_what_stands_out_of_noise_and_trend"),),
    ),
    Bug(
        "buffers that touch share memory (plan)",
        "jaxdist/plan/memory.py",
        "(placed[:, 0] <= buffer.end)",
        "(placed[:, 0] < buffer.end)",
        (LEVELS.format("test_a_packing_holds_what_lives_and_wastes_no_more_than_everything"),),
    ),
    Bug(
        "a fused value's operand given back early (plan)",
        "jaxdist/plan/memory.py",
        "passes_on += [last[o] for o in op.outputs if not self.buffered[o]]\n",
        "pass\n",
        (LEVELS.format("test_what_is_fused_keeps_what_it_reads_until_its_reader"),),
    ),
    Bug(
        "one layer's part of a stacked array left out (plan)",
        "jaxdist/plan/memory.py",
        "for j in range(number)}, sliced, ())]",
        "for j in range(number)}, (), ())]",
        (LEVELS.format("test_a_loop_copies_one_layer_of_what_it_goes_through"),),
    ),
    Bug(
        "whole arguments on every device (plan)",
        "jaxdist/plan/memory.py",
        "math.prod(x.sharding.shard_shape(x.shape))",
        "math.prod(x.shape)",
        (LEVELS.format("test_arguments_of_a_step_are_its_state_and_its_batch"),),
    ),
    Bug(
        "donated state counted twice (plan)",
        "jaxdist/step.py",
        " - memory.alias_size_in_bytes",
        "",
        (LEVELS.format("test_a_program_text_is_dumped_and_its_state_counted_once"),),
    ),
    Bug(
        "a collective's operands counted with its results (plan)",
        "jaxdist/plan/compile.py",
        'results = results[len(results) // 2 :] if kind != "permute" else results[1:2]',
        'results = results if kind != "permute" else results[1:2]',
        (LEVELS.format("test_collectives_of_a_program_text_with_loops_and_groups_of_every_form"),),
    ),
    Bug(
        "order of replica groups ignored (plan)",
        "jaxdist/plan/compile.py",
        "numbers if order is None else numbers.transpose(order)",
        "numbers",
        (LEVELS.format("test_collectives_of_a_program_text_with_loops_and_groups_of_every_form"),),
    ),
    Bug(
        "loops of the text run once (plan)",
        "jaxdist/plan/compile.py",
        "inner = (times_each(count, int(trips[1])), times_each",
        "inner = (count, times_each",
        (LEVELS.format("test_collectives_of_a_program_text_with_loops_and_groups_of_every_form"),),
    ),
    Bug(
        "textbook bubble with recomputation (plan)",
        "jaxdist/plan/search.py",
        "bubble = facts.recompute_bubble if again else facts.bubble",
        "bubble = facts.bubble",
        (SEARCH.format("test_time_is_that_of_the_layout_written_by_hand[recompute]"),),
    ),
    Bug(
        "reductions after backward hidden (plan)",
        "jaxdist/plan/search.py",
        "overlap_dp=(layouts.overlap == 1) & (layouts.pp == 1),",
        "overlap_dp=layouts.zero >= 0,",
        (SEARCH.format("test_time_is_that_of_the_layout_written_by_hand[1f1b]"),),
    ),
    Bug(
        "last part as long as the largest (plan)",
        "jaxdist/plan/search.py",
        "last_layers=deepest - (table.depth - table.last_part) / 3,",
        "last_layers=deepest,",
        (SEARCH.format("test_time_is_that_of_the_layout_written_by_hand[uneven]"),),
    ),
    Bug(
        "meshes of equal sums taken for one (plan)",
        "jaxdist/plan/search.py",
        "distinct(*(getattr(scored.layouts, axis) for axis in AXES))",
        "distinct(sum(getattr(scored.layouts, axis) for axis in AXES))",
        (SEARCH.format("test_the_best_of_each_mesh_is_its_first_in_the_order"),),
    ),
    Bug(
        "of a block only the best of each mesh kept (plan)",
        "jaxdist/plan/search.py",
        "np.union1d(best_of_each_mesh(scored, rank(scored)), memory_time_front(scored))",
        "np.sort(best_of_each_mesh(scored, rank(scored)))",
        (SEARCH.format("test_the_search_finds_what_brute_force_finds[8 in 2 nodes]"),),
    ),
    Bug(
        "parts of one's own divided evenly (plan)",
        "jaxdist/plan/search.py",
        "parts = config.part_layers if schedule == OWN else divide_layers",
        "parts = divide_layers",
        (SEARCH.format("test_a_table_of_ones_own_is_scored_as_it_is_written[mine]"),),
    ),
    Bug(
        "a budget held against the middle of the bar (plan)",
        "jaxdist/plan/formulas.py",
        "return self.dollars * (1 + self.error)",
        "return self.dollars",
        (PLAN.format("test_the_upper_end_of_the_bar_is_what_a_limit_is_held_against"),),
    ),
    Bug(
        "hours of a cost rounded down (plan)",
        "jaxdist/plan/budget.py",
        "return _rounded(number, ROUND_CEILING)",
        'return _rounded(number, "ROUND_FLOOR")',
        (PLAN.format("test_the_upper_end_of_the_bar_is_what_a_limit_is_held_against"),),
    ),
    Bug(
        "what does not fit ranked by time (plan)",
        "jaxdist/plan/search.py",
        "np.lexsort((total, np.where(fits, seconds, total), ~fits))",
        "np.lexsort((total, seconds))",
        (SEARCH.format("test_ranking_puts_what_fits_first_and_the_front_is_not_beaten"),),
    ),
    Bug(
        "messages freed a tick early (plan)",
        "jaxdist/plan/schedule_facts.py",
        "num_messages=most(sent + np.where(sender == receiver, 1, hop), used, receiver),",
        "num_messages=most(sent + np.where(sender == receiver, 1, hop), used - 1, receiver),",
        (SEARCH.format("test_schedule_facts_are_those_of_the_table[1f1b]"),),
    ),
    Bug(
        "tables extended by a round too few (plan)",
        "jaxdist/plan/schedule_facts.py",
        "rounds = (num_microbatches - base) // num_stages",
        "rounds = (num_microbatches - base) // num_stages - 1",
        (SEARCH.format("test_many_micro_batches_extend_linearly[1f1b]"),),
    ),
    Bug(
        "sum over micro-batches not held (plan)",
        "jaxdist/plan/program_memory.py",
        "sums = np.where(c.accumulate > 1, holders, 0)",
        "sums = 0 * holders",
        (SEARCH.format("test_each_phase_holds_what_it_is_said_to_hold"),),
    ),
    Bug(
        "logits in fp32 (plan)",
        "jaxdist/plan/program_memory.py",
        "c.tp * itemsize + table_copies",
        "c.tp * wide + table_copies",
        (SEARCH.format("test_each_phase_holds_what_it_is_said_to_hold"),),
    ),
    Bug(
        "ZeRO's padding left out (plan)",
        "jaxdist/plan/program_memory.py",
        "stored_layer=size(leaf.storage_local for leaf in layer),",
        "stored_layer=size(leaf.compute_local for leaf in layer) // dp,",
        (SEARCH.format("test_state_bytes_are_those_of_the_program[dp=3-more2-lion-bfloat16]"),),
    ),
    Bug(
        "messages of a pipeline not held (plan)",
        "jaxdist/plan/program_memory.py",
        "buffers + (table.num_messages + travelling) * x",
        "buffers",
        (SEARCH.format("test_each_phase_holds_what_it_is_said_to_hold"),),
    ),
    Bug(
        "a reservation counted only when settled (plan)",
        "jaxdist/plan/budget.py",
        "return self.reserved if self.actual is None else self.actual",
        "return _NOTHING if self.actual is None else self.actual",
        (BUDGET.format("test_jobs_add_up"),),
    ),
    Bug(
        "exactly the ceiling refused (plan)",
        "jaxdist/plan/budget.py",
        "if estimate > account.left:",
        "if estimate >= account.left:",
        (BUDGET.format("test_exactly_the_ceiling_is_allowed"),),
    ),
    Bug(
        "a job raises the ceiling (plan)",
        "jaxdist/plan/budget.py",
        "if ceiling > self.ceiling:",
        "if ceiling < 0:",
        (BUDGET.format("test_a_jobs_own_ceiling_is_at_most_the_logs"),),
    ),
    Bug(
        "writers of the log share its lock (plan)",
        "jaxdist/plan/budget.py",
        "fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH",
        "fcntl.LOCK_SH",
        (BUDGET.format("test_many_jobs_at_once_fill_the_ceiling_exactly"),),
    ),
    Bug(
        "a line need not follow from the one before (plan)",
        "jaxdist/plan/budget.py",
        "!= (number, previous, _hash(record))",
        '!= (number, record["previous"], _hash(record))',
        (BUDGET.format("test_lines_taken_out_moved_or_repeated_are_refused"),),
    ),
    Bug(
        "a job that crashes not settled (plan)",
        "jaxdist/plan/budget.py",
        "self.log.settle(self.job.id, self.clock.spent())",
        "_[0] or self.log.settle(self.job.id, self.clock.spent())",
        (BUDGET.format("test_a_job_that_crashes_is_settled"),),
    ),
    Bug(
        "amounts rounded to the nearest (plan)",
        "jaxdist/plan/budget.py",
        "_UP = Context(prec=60, rounding=ROUND_CEILING)",
        "_UP = Context(prec=60)",
        (BUDGET.format("test_a_cost_is_rounded_up_and_ignores_the_callers_decimal_context"),),
    ),
    Bug(
        "ZeRO shards a stage late (plan)",
        "jaxdist/plan/formulas.py",
        "np.where(zero >= from_stage, dp, 1)",
        "np.where(zero > from_stage, dp, 1)",
        (FORMULAS.format("test_zero_table[4]"),),
    ),
    Bug(
        "ZB-H1 idles for its weight gradients (plan)",
        "jaxdist/plan/formulas.py",
        "return ((pp - 1) * (f + b - w))[()]",
        "return ((pp - 1) * (f + b))[()]",
        (FORMULAS.format("test_zero_bubble_schedules_in_units_of_1f1b"),),
    ),
    Bug(
        "more hides than backward takes (plan)",
        "jaxdist/plan/time_model.py",
        "e.hide * np.minimum(may_hide, window)",
        "e.hide * may_hide",
        (LAWS.format("test_no_more_hides_than_backward_takes"),),
    ),
    Bug(
        "whole gradients summed over replicas (plan)",
        "jaxdist/plan/time_model.py",
        "replica, held * grad / dp)",
        "replica, held * grad)",
        (LAWS.format("test_sums_over_replicas_and_stages_are_of_what_their_ranks_hold"),),
    ),
    Bug(
        "whole messages between stages with sp (plan)",
        "jaxdist/plan/time_model.py",
        "np.where(sp | np.asarray(layout.scatter_gather), tp, 1)",
        "np.where(layout.scatter_gather, tp, 1)",
        (LAWS.format("test_with_sp_stages_send_a_part_of_a_message"),),
    ),
    Bug(
        "a ring of n steps (plan)",
        "jaxdist/plan/collective_cost.py",
        '"ring_all_gather": lambda n, s: CollectiveCost(n - 1, (n - 1) * s / n),',
        '"ring_all_gather": lambda n, s: CollectiveCost(n, s),',
        (FORMULAS.format("test_collectives"),),
    ),
    Bug(
        "whole buffers between nodes (plan)",
        "jaxdist/plan/collective_cost.py",
        "np.true_divide(size_bytes, inside)",
        "size_bytes",
        (FORMULAS.format("test_two_levels_send_what_one_ring_sends_in_all"),),
    ),
    Bug(
        "a ring in the wrong direction (rings)",
        "jaxdist/parallel/rings.py",
        "comm.permute(here[-shift * step], axis, shift)",
        "comm.permute(here[-shift * step], axis, -shift)",
        (RINGS.format("equals_the_collective_and_a_matmul_and_so_do_its_gradients[4-one-way-gather]"),),
    ),
    Bug(
        "a chunk placed one slot off (rings)",
        "jaxdist/parallel/rings.py",
        "y_BTF = place(y_BTF, products[distance], me + distance)",
        "y_BTF = place(y_BTF, products[distance], me + distance + 1)",
        (RINGS.format("equals_the_collective_and_a_matmul_and_so_do_its_gradients[4-one-way-gather]"),),
    ),
    Bug(
        "weight gradients from misplaced chunks (rings)",
        "jaxdist/parallel/rings.py",
        "gathered_BTD = place(gathered_BTD, part, me + distance)",
        "gathered_BTD = place(gathered_BTD, part, me - distance)",
        (RINGS.format("equals_the_collective_and_a_matmul_and_so_do_its_gradients[4-two-way-scatter]"),),
    ),
    Bug(
        "the last hop dropped (rings)",
        "jaxdist/parallel/rings.py",
        "coming = [comm.permute(total, axis, shift) for shift, total in sums.items()]",
        "coming = list(sums.values())",
        (RINGS.format("equals_the_collective_and_a_matmul_and_so_do_its_gradients[4-one-way-scatter]"),),
    ),
    Bug(
        "one chunk sent both ways (rings)",
        "jaxdist/parallel/rings.py",
        "-1: (n - 1) // 2}",
        "-1: n // 2}",
        (RINGS.format("sends_what_the_collective_sends_forward_and_backward[4-two-way-gather]"),),
    ),
    Bug(
        "a sum forgotten on its way (rings)",
        "jaxdist/parallel/rings.py",
        "coming[shift] + own if shift in coming",
        "own if shift in coming",
        (PARITY.format("tp8-sp-ring-two-way"),),
    ),
    Bug(
        "a ring of n chunks (rings, plan)",
        "jaxdist/plan/communication.py",
        "chunks = times * (enters + leaves) * (self.mesh.tp - 1)",
        "chunks = times * (enters + leaves) * self.mesh.tp",
        (SENT.format("tp8-sp-ring"),),
    ),
    Bug(
        "W gathers a block's weights again (rings)",
        "jaxdist/parallel/split.py",
        "if sum(num_bytes(v.aval) for v in fetched) > num_bytes(x_type):",
        "if fetched:",
        (SENT.format("pp2-dp2-zero3-keep-accumulate"),),
    ),
    Bug(
        "a recomputed block's second sum sent again in a pipeline (rings)",
        "jaxdist/parallel/split.py",
        "values = run(wanted, weights, fixed, micro, x)",
        "values = run([*wanted, y_var], weights, fixed, micro, x)[:-1]",
        (SENT.format("pp2-tp2-sp-remat-block"),),
    ),
    Bug(
        "the handed and the kept exchanged (rings)",
        "jaxdist/parallel/split.py",
        "for_b, fetched, weights, fixed, values)",
        "for_b, fetched[::-1], weights, fixed, values)",
        (PARITY.format("pp2-dp2-zero3-keep-accumulate"),),
    ),
    Bug(
        "the learning rate of the next step (oracle)",
        "jaxdist/step.py",
        "learning_rate(config, state.step.astype(norm.dtype))",
        "learning_rate(config, (state.step + 1).astype(norm.dtype))",
        (ORACLE.format("sgd"),),
    ),
    Bug(
        "warm-up one step too long (oracle)",
        "jaxdist/optimizer.py",
        "jnp.where(step < warmup, ramp, decayed)",
        "jnp.where(step <= warmup, ramp, decayed)",
        (ORACLE.format("sgd"),),
    ),
    Bug(
        "one dropout mask for both sites of a block (oracle)",
        "jaxdist/model.py",
        "noise.at(2).hidden(self.mlp",
        "noise.at(1).hidden(self.mlp",
        (ORACLE.format("adamw-dropout"),),
    ),
    Bug(
        "every layer has the same dropout (oracle)",
        "jaxdist/model.py",
        "layer(config, weights, x_BTD, run, noise.at(index))",
        "layer(config, weights, x_BTD, run, noise)",
        (ORACLE.format("adamw-dropout"),),
    ),
    Bug(
        "every layer of a pipeline has the same dropout (oracle)",
        "jaxdist/step.py",
        "noise(micro).at(1).at(index))",
        "noise(micro).at(1).at(0))",
        (ORACLE.format("pp2-dp2-dropout"), ORACLE.format("dp2-tp2-zero3-overlap")),
    ),
    Bug(
        "every block of queries has the same dropout (oracle)",
        "jaxdist/model.py",
        "noise.at(length).attention(",
        "noise.at(0).attention(",
        (ORACLE.format("queries-in-blocks"),),
    ),
    Bug(
        "dropout that ignores the seed (oracle)",
        "jaxdist/step.py",
        "random.fold_in(random.key(config.seed), step)",
        "random.fold_in(random.key(0), step)",
        (ORACLE.format("adamw-dropout"),),
    ),
    Bug(
        "dropout that ignores the step (oracle)",
        "jaxdist/step.py",
        "random.fold_in(random.key(config.seed), step)",
        "random.fold_in(random.key(config.seed), 0)",
        (ORACLE.format("adamw-dropout"),),
    ),
    Bug(
        "initial values that ignore the seed",
        "jaxdist/model.py",
        "GPT(config, nnx.Rngs(random.key(seed)))",
        "GPT(config, nnx.Rngs(random.key(0)))",
        (CONFIG.format("test_another_seed_gives_other_initial_values"),),
    ),
    Bug(
        "a program that draws with seed 0",
        "jaxdist/step.py",
        "draw(np.uint32(seed))",
        "draw(np.uint32(0))",
        (CONFIG.format("test_another_seed_gives_other_initial_values"),),
    ),
    Bug(
        "Lion's betas swapped (oracle)",
        "jaxdist/optimizer.py",
        "optax.scale_by_lion(beta1, beta2)",
        "optax.scale_by_lion(beta2, beta1)",
        (ORACLE.format("lion"),),
    ),
    Bug(
        "SGD with nesterov (oracle)",
        "jaxdist/optimizer.py",
        "optax.trace(beta1)",
        "optax.trace(beta1, nesterov=True)",
        (ORACLE.format("sgd"),),
    ),
    Bug(
        "Adafactor's decay of another power (oracle)",
        "jaxdist/optimizer.py",
        "return 1 - (step + 1.0) ** -power",
        "return 1 - (step + 2.0) ** -power",
        (ORACLE.format("adafactor"),),
    ),
    Bug(
        "Adafactor without clipping (oracle)",
        "jaxdist/optimizer.py",
        "optax.clip_by_block_rms(1.0)",
        "optax.clip_by_block_rms(1e9)",
        (ORACLE.format("adafactor"),),
    ),
    Bug(
        "AdamW's eps inside the root (oracle)",
        "jaxdist/optimizer.py",
        "optax.scale_by_adam(beta1, beta2, config.eps)",
        "optax.scale_by_adam(beta1, beta2, 0.0, config.eps)",
        (ORACLE.format("adamw-dropout"),),
    ),
    Bug(
        "layer norm without its bias (oracle)",
        "jaxdist/model.py",
        "(normed * self.scale[...] + self.bias[...])",
        "(normed * self.scale[...])",
        (ORACLE.format("adamw-fp32"),),
    ),
    Bug(
        "layer norm whose eps is outside the root (oracle)",
        "jaxdist/model.py",
        "lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + LAYER_NORM_EPS)",
        "(1 / (jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True)) + LAYER_NORM_EPS))",
        (ORACLE.format("adamw-fp32"),),
    ),
    Bug(
        "evaluation with dropout (oracle)",
        "jaxdist/step.py",
        "split(holders, params), batch, model.Noise(0.0, None, batch.rows))",
        "split(holders, params), batch, model.Noise(config.model.dropout, random.key(0), batch.rows))",
        (ORACLE.format("adamw-dropout"),),
    ),
    Bug(
        "evaluation with dropout in a pipeline (oracle)",
        "jaxdist/step.py",
        "through_stages(pipeline_loss, config, run, weights, batch, None)",
        "through_stages(pipeline_loss, config, run, weights, batch, random.key(config.seed))",
        (ORACLE.format("pp2-dp2-dropout"),),
    ),
    Bug(
        "weights of ZeRO-3 never updated in 16 bits",
        "jaxdist/step.py",
        "params=gather_parameters(params, layout) if layout.sharded and not layout.params_stored else params,",
        "params=gather_parameters(params, layout) if layout.sharded and not layout.params_stored else state.params,",
        (PARITY.format("dp4-tp2-sp-zero3-bf16"),),
    ),
    Bug(
        "weights of fp16 rounded to bf16 first",
        "jaxdist/step.py",
        "params = jax.tree.map(lambda p: p.astype(config.precision.dtype), updated)",
        'params = jax.tree.map(lambda p: p.astype("bfloat16").astype(config.precision.dtype), updated)',
        (PARITY.format("dp4-tp2-zero2-fp16"),),
    ),
    Bug(
        "the loss scale never moves (fp16)",
        "jaxdist/step.py",
        "scale=None if state.scale is None else next_loss_scale(state.scale, finite, config.precision),",
        "scale=None if state.scale is None else state.scale,",
        (PARITY.format("dp4-tp2-zero2-fp16"), "tests/test_precision.py::test_overflow_skips_the_update_on_every_rank"),
    ),
    Bug(
        "an empty tree passes",
        "jaxdist/verify.py",
        'missing = run.keys() ^ reference.keys() or ({"nothing was compared"} if not run else set())',
        "missing = set()",
        (VERIFY.format("test_a_missing_leaf_or_an_empty_tree_is_reported"),),
    ),
    Bug(
        "arrays that are not placed yet",
        "jaxdist/logical.py",
        "placed = {name: _placed(x, wanted[name].sharding) for name, x in arrays.items()}",
        "placed = arrays",
        (CHECKPOINT.format("test_logical_arrays_are_the_same_from_every_layout"),),
    ),
    Bug(
        "layers that two stages exchange put in the order of arrival",
        "jaxdist/parallel/relayout.py",
        "arrived[stage, list(wanted[stage]).index(row)] = source * longest + place",
        "arrived[stage, place] = source * longest + place",
        (CONFIG.format("test_layers_change_stages_and_come_back"),),
    ),
    Bug(
        "the gradient of a looked-up row is added up in 16 bits",
        "jaxdist/parallel/tensor.py",
        "zeros_VD.at[index_BT].add(wide).astype(d_BTD.dtype), None",
        "zeros_VD.astype(d_BTD.dtype).at[index_BT].add(d_BTD), None",
        (SIXTEEN.format("test_what_is_summed_over_tokens_is_summed_in_fp32[accumulate-bfloat16]"),),
    ),
    Bug(
        "a bias's gradient is added up in 16 bits",
        "jaxdist/model.py",
        "return x + jnp.broadcast_to(wide, x.shape).astype(bias.dtype)",
        "return x + bias",
        (SIXTEEN.format("test_what_is_summed_over_tokens_is_summed_in_fp32[pipeline-float16]"),),
    ),
    Bug(
        "micro-batches summed in 16 bits",
        "jaxdist/step.py",
        "jnp.zeros(p.shape, config.precision.master_dtype), summands)",
        "jnp.zeros(p.shape, config.precision.dtype), summands)",
        (SIXTEEN.format("test_what_a_loop_sums_is_summed_in_fp32[accumulate]"),),
    ),
    Bug(
        "micro-batches summed in 16 bits under overlap",
        "jaxdist/step.py",
        "return comm.varying(jnp.zeros(shape, precision.master_dtype), (*leaf.storage_axes, *leaf.reduce_axes))",
        "return comm.varying(jnp.zeros(shape, precision.dtype), (*leaf.storage_axes, *leaf.reduce_axes))",
        (SIXTEEN.format("test_what_a_loop_sums_is_summed_in_fp32[overlap-accumulate]"),),
    ),
    Bug(
        "a pipeline sums its layers' gradients in 16 bits",
        "jaxdist/step.py",
        "recompute_every=run.remat_every, dtype=config.precision.master_dtype)",
        "recompute_every=run.remat_every, dtype=None)",
        (SIXTEEN.format("test_what_a_loop_sums_is_summed_in_fp32[pipeline]"),),
    ),
    Bug(
        "a pipeline sums its tied table's gradient in 16 bits",
        "jaxdist/parallel/pipeline.py",
        "            d_shared, d_layers = jax.tree.map(lambda w: self.zeros(type_of(w), dtype=dtype), (self.shared, "
        "self.layers))",
        "            d_layers = jax.tree.map(lambda w: self.zeros(type_of(w), dtype=dtype), self.layers)\n"
        "            d_shared = jax.tree.map(lambda w: self.zeros(type_of(w)), self.shared)",
        (SIXTEEN.format("test_what_a_loop_sums_is_summed_in_fp32[pipeline]"),),
    ),
    Bug(
        "chunks of the loss sum the table's gradient in 16 bits",
        "jaxdist/parallel/tensor.py",
        "wide = jnp.promote_types(dtype, jnp.float32)",
        "wide = dtype",
        (SIXTEEN.format("test_what_a_loop_sums_is_summed_in_fp32[loss-chunks]"),),
    ),
    Bug(
        "softmax of attention in 16 bits",
        "jaxdist/model.py",
        "        scores_BNTS = scores_BNTS.astype(jnp.promote_types(scores_BNTS.dtype, jnp.float32))\n",
        "",
        (SIXTEEN.format("test_exponentials_and_norms_are_computed_in_fp32[accumulate-bfloat16]"),),
    ),
    Bug(
        "softmax of the loss in 16 bits",
        "jaxdist/parallel/tensor.py",
        "    logits_RV = logits_RV.astype(jnp.promote_types(x_RD.dtype, jnp.float32))\n",
        "",
        (SIXTEEN.format("test_exponentials_and_norms_are_computed_in_fp32[accumulate-bfloat16]"),),
    ),
    Bug(
        "layer norm in 16 bits",
        "jaxdist/model.py",
        "x = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))",
        "x = x_BTD",
        (SIXTEEN.format("test_exponentials_and_norms_are_computed_in_fp32[accumulate-bfloat16]"),),
    ),
    Bug(
        "gradients sent in 16 bits",
        "jaxdist/parallel/data.py",
        "arrays = [g.astype(dtype) if leaf.reduce_axes or leaf.users else g",
        'arrays = [g.astype("bfloat16") if leaf.reduce_axes or leaf.users else g',
        (SIXTEEN.format("test_what_ranks_sum_of_gradients_is_summed_in_fp32[accumulate]"),),
    ),
    Bug(
        "a shared table's gradient added over stages in 16 bits",
        "jaxdist/parallel/data.py",
        "arrays = scatter_from_users(leaves, arrays)",
        'arrays = scatter_from_users(leaves, [g.astype("bfloat16") for g in arrays])',
        (SIXTEEN.format("test_what_stages_add_of_a_shared_table_is_added_in_fp32[pipeline]"),),
    ),
]


@dataclass(frozen=True)
class BugFlags:
    """Plant every bug of the list in a copy of the source and count how many the tests catch."""

    only: str = ""
    """Run the bugs whose name contains this text."""


def require_clone() -> None:
    """Raises: ConfigError where there are no tests to run: a wheel holds none."""
    if not (ROOT / "tests").is_dir():
        raise ConfigError("the project's own tests", "an installed jaxdist has none", "Run this program in a clone")


def main(flags: BugFlags, console: Console) -> int:
    require_clone()
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

        table = Rows("bug", "file", "verdict")
        caught = 0
        for number, bug in enumerate(bugs, 1):
            with console.status(f"{bug.name} ({number} of {len(bugs)})"):
                was_caught = is_caught(copy, bug)
            caught += was_caught
            verdict = "caught" if was_caught else "NOT CAUGHT"
            table.add_row(bug.name, bug.path, verdict)
            if not console.is_terminal:
                console.print(f"{'caught' if was_caught else 'NOT CAUGHT'}  {bug.name}")
    table.print(
        console, left=("file", "verdict"), under=("file",), styles={"caught": "green", "NOT CAUGHT": "bold red"}
    )
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
    run_program(BugFlags, main, "planted_bugs")
