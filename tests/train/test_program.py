"""What the program of each strategy sends and keeps, read from the lowered program and the compiler."""

import dataclasses
import math
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample

import jaxdist
from experiments.strategies import BY_NAME, STRATEGIES
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import GlobalBatch
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape, make_abstract_mesh, make_mesh, parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.parallel.pipeline.split_backward import inner_programs
from jaxdist.parity import one_device
from jaxdist.plan import formulas
from jaxdist.plan.proof.trace import collectives_of, equations, step_collectives, summary, total_sent
from jaxdist.specs import local_bytes
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program, step_options

PACKAGE = str(Path(jaxdist.__file__).parent)
HLO_NAMES = {kind: kind for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")}
HLO_NAMES["permute"] = "collective_permute"


@cache
def traced(name: str):
    config = BY_NAME[name].run_config()
    with jax.enable_x64(config.precision.dtype == "float64"):
        program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
        return program, program.step.trace(program.abstract_state(), program.abstract_batch())


def collectives(name: str):
    program, trace = traced(name)
    return step_collectives(program, trace)


DP, TP, PP = ("dp",), ("tp",), ("pp",)
NUMBERS = 64  # bytes of a count, a loss or the norms of all groups of leaves, at most; the smallest leaf has more
# (kind, axes, loop depth) -> how many stand in the program. Three messages of a few numbers travel in every
# data-parallel step: the token count, the loss, and the gradient norms where leaves are sharded. A tp step adds:
# embedding, two for the softmax, and the head's input gradient outside the blocks; 2 + 2 in a block; and its own part
# of the norms.
PROMISED = {
    "dp8-flat": {("all_reduce", DP, 0): 2 + 1},
    "dp8-per-parameter": {("all_reduce", DP, 0): 2 + 16},
    "dp4-accumulate": {("all_reduce", DP, 0): 2 + 1},
    "replica2-dp4": {("all_reduce", ("replica", "dp"), 0): 2 + 1},
    "accumulate": {},
    "tp4-sp": {
        ("all_gather", TP, 1): 2 + 2,
        ("reduce_scatter", TP, 1): 2 + 2,
        ("all_gather", TP, 0): 1 + 1,
        ("reduce_scatter", TP, 0): 1 + 1,
        ("all_reduce", TP, 0): 2 + 1 + 1,  # softmax, norm, and the leaves that saw only a part of the sequence
    },
    "dp8-zero1": {("all_reduce", DP, 0): 2 + 1, ("reduce_scatter", DP, 0): 1, ("all_gather", DP, 0): 1},
    "dp4-zero2-accumulate": {
        ("all_reduce", DP, 0): 2 + 1,
        ("reduce_scatter", DP, 2): 1,
        ("reduce_scatter", DP, 1): 1,
        ("all_gather", DP, 0): 1,
    },
    "dp8-zero3": {
        ("all_reduce", DP, 0): 2 + 1,
        ("all_gather", DP, 1): 1 + 1,  # a block forward, again backward
        ("reduce_scatter", DP, 1): 1,
        ("all_gather", DP, 0): 1 + 1,  # embedding; head, forward and backward at once
        ("reduce_scatter", DP, 0): 1,  # of both
    },
    "dp4-zero3-keep": {
        ("all_reduce", DP, 0): 2 + 1,
        ("all_gather", DP, 1): 1,
        ("reduce_scatter", DP, 1): 1,
        ("all_gather", DP, 0): 1,
        ("reduce_scatter", DP, 0): 1,
    },
    # With overlap the loops leave out one layer, or two: the last turns round, and the first has none before it.
    "dp8-zero1-overlap": {
        ("all_reduce", DP, 0): 2 + 1,
        ("reduce_scatter", DP, 1): 1,
        ("reduce_scatter", DP, 0): 2 + 1,
        ("all_gather", DP, 0): 1,
    },
    "dp8-zero3-overlap": {
        ("all_reduce", DP, 0): 2 + 1,
        ("all_gather", DP, 1): 1 + 1,
        ("reduce_scatter", DP, 1): 1,
        ("all_gather", DP, 0): 2 + 1 + 1,
        ("reduce_scatter", DP, 0): 2 + 1,
    },
    "replica2-dp4-zero3": {
        ("all_reduce", ("replica", "dp"), 0): 2,
        ("all_reduce", DP, 0): 1,
        ("all_reduce", ("replica",), 0): 1,  # shards, across the groups
        ("all_gather", DP, 1): 1 + 1,
        ("reduce_scatter", DP, 1): 1,
        ("all_gather", DP, 0): 1 + 1,
        ("reduce_scatter", DP, 0): 1,
    },
    "dp2-tp2": {
        ("all_reduce", DP, 0): 2 + 2,  # leaves split over tp, and leaves that are not
        ("all_reduce", TP, 0): 4 + 1,
        ("all_reduce", TP, 1): 2 + 2,
    },
    # A pipeline: the loss; positions and final norm, which every stage holds; the norm of what stages share. A permute
    # for each set of stages that send at a tick, up and down; a ring of two has one way. The tied table's parts to the
    # ends, and its gradient's from there.
    "pp4-1f1b": {("permute", PP, 1): 5 + 3, ("permute", PP, 0): 3 + 3, ("all_reduce", PP, 0): 3},
    "pp4-1f1b-overlap": {("permute", PP, 1): 1 + 1, ("permute", PP, 0): 3 + 3, ("all_reduce", PP, 0): 3},
    "pp2-zb-v": {("permute", PP, 1): 3, ("permute", PP, 0): 1 + 1, ("all_reduce", PP, 0): 3},
    "pp2-dp2-tp2-sp-zero1": {
        ("permute", PP, 1): 2,
        ("permute", PP, 0): 1 + 1,
        ("all_gather", TP, 2): 2 + 2 + 1 + 1,  # in a block; for the head; of the embedding's gradient
        ("reduce_scatter", TP, 2): 2 + 2 + 1 + 1,  # in a block; of the embedding; of the head's input gradient
        ("all_reduce", TP, 2): 2,  # softmax
        # Leaves are sharded in three ways (over pp, both, neither), and each way has its own scatter and gather, ...
        ("reduce_scatter", DP, 0): 3,
        ("all_gather", DP, 0): 3,
        # ... pays what else it owes (over pp what every stage holds, over tp what saw a part of the sequence), ...
        ("all_reduce", ("pp", "tp"), 0): 1,
        ("all_reduce", TP, 0): 1,
        # ... and has its share of the norm; then there are the token count and the loss.
        ("all_reduce", DP, 0): 1 + 1,
        ("all_reduce", ("pp", "dp"), 0): 1 + 1,
        ("all_reduce", ("pp", "tp", "dp"), 0): 1,
    },
}


def test_a_model_is_told_how_its_run_is_divided():
    how = {"sp": True, "tp_ring": "one-way", "remat": "selective", "loss_chunks": 2, "attention": "xla"}
    config = RunConfig(PRESETS["proof"], ParallelConfig(parse_mesh("dp=2,cp=2,tp=2"), **how), batch_size=16)
    ctx = build_program(config, make_abstract_mesh(config.parallel.mesh)).model.ctx
    assert (ctx.sp, ctx.ring, ctx.split, ctx.attention) == (True, "one-way", config.parallel.split, "xla")
    assert (ctx.selective, ctx.loss_chunks, ctx.on_gpu, ctx.draws_choices) == (True, 2, False, False)
    key = jax.random.key(0)
    assert (dataclasses.replace(ctx, key=key).at(3).key == jax.random.fold_in(key, 3)) and ctx.at(3).key is None


@pytest.mark.parametrize("name", PROMISED)
def test_exactly_the_promised_collectives(name):
    assert summary(collectives(name)) == PROMISED[name]


COUNTED = [
    pytest.param(s, id=s.name, marks=[] if s.name in PROMISED else pytest.mark.exhaustive) for s in STRATEGIES if s.mesh
]


@pytest.mark.parametrize("strategy", COUNTED)
def test_trace_counts_what_the_lowered_program_holds(strategy):
    """Same collectives in the StableHLO text as in the trace, and no gradient reduction where it does not belong."""
    name = strategy.name
    program, trace = traced(name)
    found = collectives(name)
    with jax.enable_x64(program.config.precision.dtype == "float64"):
        text = trace.lower().as_text()
    in_text = {kind: len(re.findall(rf"stablehlo\.{name}\b", text)) for kind, name in HLO_NAMES.items()}
    in_trace = Counter(c.kind for c in found)
    # An exchange among some ranks of an axis sends as so many permutes do, and is traced as these (`as_permutes`).
    for counts in (in_text, in_trace):
        counts["permute"] += counts["all_to_all"]
        counts["all_to_all"] = 0
    if name == "dp4-zero3-overlap-per-parameter":  # gathered alone, what a layer's backward does not read is dropped
        assert all(num <= in_trace[kind] for kind, num in in_text.items())
    else:
        assert in_text == {kind: in_trace[kind] for kind in HLO_NAMES}

    zero, sharded = program.config.parallel.zero, program.layout.sharded
    for c in found:
        data_like = set(c.axes) & {"replica", "dp"}
        if data_like and c.depth > 0 and not program.config.parallel.overlap:
            assert zero >= 2 and c.axes == ("dp",) and c.kind != "all_reduce", f"{c} inside a loop"
        if sharded and c.kind == "all_reduce" and "dp" in c.axes:
            assert c.full_bytes <= NUMBERS, f"{c}: ZeRO leaves no all-reduce over dp but a few numbers"


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("remat", ["none", "selective", "block"])
def test_tensor_parallel_volume_is_that_of_the_papers(sp, remat):
    """8bsh(t-1)/t elements a layer, two all-reduces more for embedding and head; recompute repeats what it needs."""
    model, mesh, rows = GPT2Config(4, 64, 8, 256, 32, 256), MeshShape(tp=4), 16
    run = RunConfig(model, ParallelConfig(mesh=mesh, sp=sp, remat=remat), batch_size=rows)
    program = build_program(run, make_abstract_mesh(mesh))
    trace = program.step.trace(program.abstract_state(), program.abstract_batch())
    activation = rows * model.seq_len * model.width
    found = [c for c in collectives_of(trace.jaxpr, mesh) if c.full_bytes == 4 * activation]
    sums = model.num_layers * (4 + (1.5 if sp else 1) * (remat == "block")) + 2
    assert total_sent(found, mesh) / 4 == sums * 2 * activation * 3 / 4
    assert sum(c.count for c in found) == sums * (2 if sp else 1)


def producers_of_stacked_weights(name):
    """The operations of a step that make an array of the shape of a whole weight matrix of all layers."""
    program, trace = traced(name)
    blocks = jax.tree.leaves(program.layout.leaves["blocks"])
    whole = {leaf.compute_local for leaf in blocks if leaf.param.decay}
    return {
        eqn.primitive.name
        for eqn, _, depth in equations(trace.jaxpr)
        for v in eqn.outvars
        if v.aval.shape in whole and eqn.primitive.name != "shard_map"
    }


def test_zero3_keeps_no_gathered_weight():
    """No value of the whole step has the shape of a stacked whole weight, unless keeping them was asked for."""
    for name in ("dp8-zero3", "dp4-tp2-sp-zero3", "dp4-zero3-accumulate", "dp4-zero3-remat-every-2"):
        assert not producers_of_stacked_weights(name)
    assert "scan" in producers_of_stacked_weights("dp4-zero3-keep")


def test_zero2_never_holds_a_whole_stacked_gradient():
    """Only the parameters themselves have that shape: cast before the loop, gathered after the update."""
    assert producers_of_stacked_weights("dp8-zero2") <= {"pvary", "reshape", "slice"}
    assert "scan" in producers_of_stacked_weights("dp8-zero1")


# ---------------------------------------------------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------------------------------------------------

DIVISIBLE = GPT2Config(num_layers=2, width=64, num_heads=8, ffn_width=256, seq_len=32, vocab_size=256)


def zero_formula(psi: float, n: int, zero: int, params: int, grads: int, optimizer: int) -> float:
    """Bytes a device: arXiv 1910.02054, figure 1."""
    return formulas.state_bytes(psi, formulas.StateRecipe(params, grads, optimizer), zero, n).total


@pytest.mark.parametrize(
    ("zero", "ranks", "tp", "dtype"),
    [(0, 2, 1, "float32"), (1, 8, 1, "float32"), (2, 4, 2, "bfloat16"), (3, 4, 1, "float32"), (3, 4, 2, "bfloat16")],
)
def test_state_bytes_follow_the_zero_formula(zero, ranks, tp, dtype):
    """Live bytes of real arrays, device by device, and the gradients the step hands to the optimiser.

    fp32: 4 + 4 + 8 bytes a parameter (the parameters are the masters). bf16: 2 + 12, and gradients in fp32: 4.
    """
    shape = MeshShape(dp=ranks, tp=tp)
    config = RunConfig(
        DIVISIBLE, ParallelConfig(mesh=shape, zero=zero), precision=PrecisionConfig(dtype=dtype), batch_size=16
    )
    program = build_program(config, make_mesh(shape, DEVICES), with_gradients=True)
    held = Counter()
    for x in jax.tree.leaves(program.init(0)):
        for shard in x.addressable_shards:
            held[shard.device] += shard.data.nbytes
    leaves = jax.tree.leaves(program.layout.leaves)
    psi = sum(math.prod(leaf.compute_local) for leaf in leaves)
    params, optimizer = (4, 8) if dtype == "float32" else (2, 12)
    counters = 4 + 4  # the step, and AdamW's own count
    expected = zero_formula(psi, ranks, zero, params, 0, optimizer) + counters
    assert set(held.values()) == {expected}
    assert local_bytes(program.abstract_state()) == expected

    # Gradients between backward and update: whole for stages 0 and 1, shards from stage 2 on.
    whole = sum(math.prod(leaf.compute_local) for leaf in leaves) * 4
    shards = sum(math.prod(leaf.storage_local) for leaf in leaves) * 4
    assert (shards if zero >= 2 else whole) == zero_formula(psi, ranks, zero, 0, 4, 0)


def test_state_bytes_count_padding():
    ranks = 5
    shape = MeshShape(dp=ranks)
    config = RunConfig(DIVISIBLE, ParallelConfig(mesh=shape, zero=1), batch_size=15)
    program = build_program(config, make_mesh(shape, DEVICES))
    leaves = jax.tree.leaves(program.layout.leaves)
    psi = sum(math.prod(leaf.shape) for leaf in leaves)
    padded = sum(math.prod(leaf.storage_shape) for leaf in leaves)
    assert psi < padded < 1.1 * psi
    assert local_bytes(program.abstract_state()) == 4 * psi + 8 * padded / ranks + 8
    assert {x.addressable_shards[0].data.size for x in jax.tree.leaves(program.init(0).moments[1].mu)} == {
        math.prod(leaf.storage_local) for leaf in leaves
    }


@pytest.mark.parametrize("name", in_sample(["dp4-tp2-sp-zero3", "dp2-tp2-zero1-bf16"], ["dp2-tp2-zero1-bf16"]))
def test_state_is_donated(name):
    config = BY_NAME[name].run_config()
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    compiled = program.compile_step()
    state = program.init(0)
    batch = program.put({k: jnp.zeros(x.shape, x.dtype) for k, x in program.abstract_batch()._asdict().items() if x})
    compiled(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.moments, state.master)))


def test_a_rank_reads_its_own_rows_of_a_batch():
    config = BY_NAME["dp2-tp2"].run_config()
    read = []

    def windows(rows):
        read.append(rows.tolist())
        tokens = np.repeat(rows[:, None], config.model.seq_len, axis=1).astype(np.int32)
        return tokens, tokens

    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    batch = program.put(GlobalBatch(config.batch_size, windows))
    half = config.batch_size // 2
    assert sorted(read) == [list(range(half)), list(range(half, 2 * half))]
    assert (np.asarray(batch.inputs)[:, 0] == np.arange(2 * half)).all()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: {name: np.concatenate([x, x]) for name, x in b.items()}, r"'inputs': \(16, 32\).*\(8, 32\)"),
        (lambda b: {name: x for name, x in b.items() if name != "rows"}, "must be .*'rows'"),
        (lambda b: b | {"starts": 0 * b["inputs"]}, "mask_documents"),
        (lambda b: b | {"targets": b["targets"] + 0.5}, r"'targets': dtype\('float64'\).* whole numbers, "),
        (lambda b: b | {"inputs": b["inputs"] - 1}, "inputs from -1"),
        (lambda b: b | {"targets": 300 + 0 * b["targets"]}, "targets from 300 to 300.*at most 249"),
    ],
)
def test_a_batch_that_is_not_the_run_s_is_refused(change, match):
    config = RunConfig(PRESETS["proof"], ParallelConfig(MeshShape(dp=2)), batch_size=8)
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    tokens = np.arange(8 * 32).reshape(8, 32) % 250
    with pytest.raises(ConfigError, match=match):
        program.put(change({"inputs": tokens, "targets": tokens, "rows": np.arange(8)}))


def test_a_batch_of_any_integers_is_what_a_compiled_step_takes():
    config = RunConfig(PRESETS["proof"], batch_size=2)
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES[:1]))
    tokens = np.arange(64, dtype=np.int8).reshape(2, 32)
    batch = program.put({"inputs": tokens, "targets": tokens.tolist(), "rows": np.arange(2)})
    assert all(x.dtype == "int32" for x in jax.tree.leaves(batch)) and np.array_equal(batch.targets, tokens)


@pytest.mark.parametrize("axes", [{"dp": 2}, dict.fromkeys(("pp", "replica", "dp", "ep", "cp", "tp"), 1)])
def test_a_mesh_that_is_not_the_configuration_s_is_refused(axes):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=DEVICES[: math.prod(axes.values())])
    with pytest.raises(ConfigError, match="make_mesh"):
        build_program(RunConfig(PRESETS["proof"], ParallelConfig(MeshShape(dp=2)), batch_size=8), mesh)


def test_a_state_that_the_compiler_would_hold_twice_is_refused():
    config = BY_NAME["dp2-tp2"].run_config()
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    kept = dataclasses.replace(program, step=jax.jit(lambda state, batch: (state, batch)))
    with pytest.raises(RuntimeError, match="donation failed"):
        kept.compile_step()


def test_what_attention_cannot_do_is_refused_before_the_step_is_traced():
    wanted = ParallelConfig(MeshShape(dp=2), attention="cudnn")
    model = GPT2Config(num_layers=2, width=64, num_heads=2, ffn_width=128, seq_len=16, vocab_size=64, dropout=0.1)
    config = RunConfig(model, wanted, precision=PrecisionConfig("bfloat16"), batch_size=4)
    with pytest.raises(ConfigError, match="attention=cudnn"):
        build_program(config, make_abstract_mesh(MeshShape(dp=2)))


def test_a_step_runs_the_attention_that_was_chosen():
    model = GPT2Config(num_layers=2, width=64, num_heads=2, ffn_width=128, seq_len=16, vocab_size=64)
    for platform, chosen in (("gpu", "cudnn"), ("cpu", "xla")):
        for training in (True, False):
            assert model.attention_for("auto", platform, "bfloat16", training=training) == chosen


@pytest.mark.exhaustive
def test_compiled_memory_of_zero3_and_remat():
    """What the compiler allocates: keeping gathered weights costs more, recomputing blocks costs less."""
    wide = GPT2Config(num_layers=8, width=128, num_heads=8, ffn_width=512, seq_len=64, vocab_size=256)

    def temp(**parallel):
        shape = MeshShape(dp=4)
        config = RunConfig(wide, ParallelConfig(mesh=shape, **parallel), OptimizerConfig(), batch_size=4)
        program = build_program(config, make_mesh(shape, DEVICES))
        lowered = program.step.lower(program.abstract_state(), program.abstract_batch())
        return (
            lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).memory_analysis().temp_size_in_bytes
        )

    blocks = 12 * 8 * 128 * 128 * 4  # bytes of the whole block weights
    kept, dropped = temp(zero=3, reshard_after_forward=False), temp(zero=3)
    assert kept - dropped > 0.8 * blocks
    assert temp(zero=2) < temp(zero=1)
    assert temp(remat="block") < temp(remat="selective") < temp()


def test_abstract_mesh_traces_a_thousand_ranks():
    shape = MeshShape(dp=512, tp=2)
    config = dataclasses.replace(BY_NAME["dp4-tp2-sp-zero3"].run_config(), batch_size=512)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, mesh=shape))
    program = build_program(config, make_abstract_mesh(shape))
    trace = program.step.trace(program.abstract_state(), program.abstract_batch())
    assert summary(collectives_of(trace.jaxpr, shape)) == summary(collectives("dp4-tp2-sp-zero3"))


@pytest.mark.parametrize("name", ["dp2", "tp4-sp", "dp2-tp2-zero2-clipped", "pp2-interleaved"])
def test_the_heads_weight_gradient_does_not_wait_for_the_layers(name):
    config = BY_NAME[name].run_config()
    table = (config.model.padded_vocab_size // config.parallel.mesh.tp, config.model.width)
    shapes = [[v.aval.shape for v in eqn.outvars] for eqn, *_ in equations(traced(name)[1].jaxpr) if is_barrier(eqn)]
    assert any(len(pair) == 2 and pair[1] == table and pair[0][-1] == config.model.width for pair in shapes), shapes


def is_barrier(eqn) -> bool:
    return eqn.primitive.name == "optimization_barrier"


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_loss_scatters_no_logits_and_in_chunks_never_has_all(chunks):
    config = BY_NAME["loss-chunks-4"].run_config()
    config = config if chunks == 4 else one_device(config)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=1000))
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    rows, vocab = config.batch_size * config.model.seq_len, config.model.padded_vocab_size
    made = {"scatter": 0, "dot_general": 0}

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            kind = "scatter" if eqn.primitive.name.startswith("scatter") else eqn.primitive.name
            for out in eqn.outvars:
                if kind in made and out.aval.shape[-1:] == (vocab,):
                    made[kind] = max(made[kind], out.aval.size)
            for inner in inner_programs(eqn):
                look(getattr(inner, "jaxpr", inner))

    look(traced.jaxpr.jaxpr)
    assert made == {"scatter": 0, "dot_general": rows * vocab // chunks}


@pytest.mark.parametrize(
    ("mesh", "overlap", "platform"),
    [("pp=2", True, "gpu"), ("pp=2", True, "cpu"), ("pp=2", False, "gpu"), ("dp=2", True, "gpu")],
)
def test_two_messages_may_travel_at_once_where_a_pipeline_overlaps_them(mesh, overlap, platform):
    config = RunConfig(GPT2Config(4, 64, 8, 256, 32, 256), ParallelConfig(mesh=parse_mesh(mesh), overlap=overlap))
    option = {"xla_gpu_experimental_parallel_collective_overlap_limit": "2"}
    assert step_options(config, platform) == (option if (mesh, overlap, platform) == ("pp=2", True, "gpu") else {})


@pytest.mark.parametrize("mesh", ["dp=2", "dp=4", "dp=8"])
def test_volume_per_step_is_that_of_the_papers(mesh):
    """DP and ZeRO-1/2 send 2 psi (n-1)/n elements, ZeRO-3 3 psi, keeping weights 2 psi; scalars left out."""
    n = parse_mesh(mesh).dp
    model = GPT2Config(4, 64, 8, 256, 32, 256)

    def sent(**parallel):
        shape = parse_mesh(mesh)
        program = build_program(RunConfig(model, ParallelConfig(mesh=shape, **parallel)), make_abstract_mesh(shape))
        trace = program.step.trace(program.abstract_state(), program.abstract_batch())
        big = [c for c in collectives_of(trace.jaxpr, shape) if c.full_bytes > NUMBERS]
        leaves = {leaf.name: math.prod(leaf.shape) for leaf in jax.tree.leaves(program.layout.leaves)}
        return total_sent(big, shape) / 4, sum(leaves.values()), leaves["positions"]

    for parallel, factor in (({}, 2), ({"zero": 1}, 2), ({"zero": 2}, 2)):
        elements, psi, _ = sent(**parallel)
        assert elements == factor * psi * (n - 1) / n
    elements, psi, _ = sent(zero=3, reshard_after_forward=False)
    assert elements == 2 * psi * (n - 1) / n
    # The tied table is gathered for the embedding and for the head, its gradient scattered once. What else is not a
    # block's is gathered once: the embedding's backward does not need it, the head's follows at once.
    elements, psi, positions = sent(zero=3)
    assert elements == (3 * psi - positions - 2 * model.width) * (n - 1) / n


def test_the_first_state_is_made_in_the_memory_of_what_it_is_made_from():
    """Else a run would need 18 bytes a parameter before its first step, and 14 from then on."""
    config = dataclasses.replace(BY_NAME["dp4-tp2-sp-zero3"].run_config(), precision=PrecisionConfig("bfloat16"))
    program = build_program(config, make_mesh(config.parallel.mesh, jax.devices()[:8]))
    draw, store, place = jax.make_jaxpr(lambda: program.init(0))().eqns
    assert not any(draw.params["donated_invars"])
    assert all(store.params["donated_invars"]) and all(place.params["donated_invars"])


def proof(preset: str, mesh: str) -> RunConfig:
    return RunConfig(PRESETS[preset], ParallelConfig(parse_mesh(mesh)), batch_size=16)


NAMED = ("tp2-sp-ring", "dp2-cp2-tp2-sp-documents", "pp2-tp2-sp-zb-v-blocked", "dp4-tp2-sp-zero3-loss-chunks")


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(BY_NAME[name].run_config(), id=name) for name in NAMED),
        pytest.param(proof("llama-proof", "dp=2,tp=2"), id="llama"),
        pytest.param(proof("moe-proof", "dp=2,ep=2"), id="experts"),
    ],
)
def test_an_array_has_the_dims_that_its_name_tells(config):
    """x_BTD has three, T1 is a T and a 1, and within a function a letter is one size: but for T, which sp divides."""
    wrong, seen = set(), Counter()

    def look(frame, event, _):
        if event != "return" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        sizes = {"1": 1}
        for name, value in frame.f_locals.items():
            dims = re.search(r"_([A-Z][A-Z1]*)$", name)
            if dims is None or not isinstance(value, jax.Array):
                continue
            seen[frame.f_code.co_filename] += 1
            fits = [n == sizes.setdefault(d, n) or d == "T" for d, n in zip(dims[1], value.shape, strict=False)]
            if value.ndim != len(dims[1]) or not all(fits):
                wrong.add((frame.f_code.co_qualname, name, value.shape))

    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    state, batch = program.abstract_state(), program.abstract_batch()
    jax.clear_caches()  # a function that was traced before is not called again
    sys.setprofile(look)
    try:
        program.step.trace(state, batch)
    finally:
        sys.setprofile(None)
    assert not wrong and len(seen) > 5
