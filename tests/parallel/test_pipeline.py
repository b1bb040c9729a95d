"""The executor and the split of backward, without the GPT and with it: equality, ticks, buffers, what is sent."""

import dataclasses
from collections import Counter
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample
from jax.sharding import AxisType, Mesh, PartitionSpec

from experiments.strategies import BY_NAME
from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.pipeline.buffers import Buffer
from jaxdist.parallel.pipeline.builders import NAMES, make_schedule
from jaxdist.parallel.pipeline.executor import Stages, pipeline_gradients, pipeline_loss
from jaxdist.parallel.pipeline.instructions import ARRIVALS, Loop
from jaxdist.parallel.pipeline.lowering import forwards, lower, senders_of
from jaxdist.parallel.pipeline.schedules import Action, Phase, Schedule
from jaxdist.parallel.pipeline.simple import pipeline
from jaxdist.parallel.pipeline.simulate import in_flight
from jaxdist.parallel.pipeline.split_backward import split_layer
from jaxdist.parallel.pipeline.text import parse
from jaxdist.plan.proof.trace import equations, named_bytes, step_collectives
from jaxdist.strategy import ParallelConfig
from jaxdist.train.program import build_program

PP, TP = ("pp",), ("tp",)


def mesh_of(**sizes) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    return Mesh(
        np.asarray(DEVICES[:count]).reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


# ---- any stage_fn ----


def stage_fn(params, x):
    """Something that is no transformer block: a gated residual with a parameter that is used twice."""
    hidden = jnp.tanh(x @ params["in"]) * jax.nn.sigmoid(x * params["gate"])
    return x + hidden @ params["in"].T + params["gate"]


def loss_fn(y, target):
    return jnp.square(y - target).sum()


def toy(num_parts: int, num_microbatches: int, width: int = 6):
    """(params[P, ...] in model order, inputs[M, 5, D], targets[M, 5, D])."""
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(num_parts, width, width)) * 0.3, "gate": rng.normal(size=(num_parts, width))}
    return jax.tree.map(jnp.asarray, (params, *rng.normal(size=(2, num_microbatches, 5, width))))


def plain_gradients(params, inputs, targets):
    def total(params):
        loss = 0
        for x, target in zip(inputs, targets, strict=True):
            for part in range(params["gate"].shape[0]):
                x = stage_fn(jax.tree.map(lambda p, part=part: p[part], params), x)
            loss += loss_fn(x, target)
        return loss

    return jax.jit(jax.value_and_grad(total))(params)


def assert_pipeline_is_plain(schedule, depth=1):
    with jax.enable_x64(True):
        params, inputs, targets = toy(depth * schedule.num_parts, schedule.num_microbatches)
        parts = [schedule.part(s, c) for s in range(schedule.num_stages) for c in range(schedule.num_chunks)]
        order = [part * depth + layer for part in parts for layer in range(depth)]
        staged = PartitionSpec("pp" if schedule.num_stages > 1 else None)
        run = jax.jit(
            jax.shard_map(
                pipeline(stage_fn, loss_fn, schedule),
                mesh=mesh_of(pp=schedule.num_stages),
                in_specs=(staged, PartitionSpec(), PartitionSpec()),
                out_specs=(PartitionSpec(), staged),
            )
        )
        loss, grads = run(jax.tree.map(lambda p: p[np.array(order)], params), inputs, targets)
        expected_loss, expected = plain_gradients(params, inputs, targets)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
        for name, g in grads.items():
            np.testing.assert_allclose(g, expected[name][np.array(order)], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "microbatches"), in_sample([(2, 5), (4, 3)], [(4, 3)]))
def test_any_stage_function(name, stages, microbatches):
    assert_pipeline_is_plain(make_schedule(name, stages, microbatches))


@pytest.mark.parametrize("name", in_sample(NAMES, ["1f1b", "v-min"]))
def test_messages_that_travel_while_stages_compute(name):
    for sizes in ((1, 2), (2, 5), (4, 3)) if name == "zb-v" else ((3, 4),):
        assert_pipeline_is_plain(make_schedule(name, *sizes, send_latency=2))


@pytest.mark.parametrize("sizes", [("interleaved", 3, 4, 3), ("1f1b", 1, 3), ("zb-v", 1, 2)])
def test_more_chunks_and_a_single_stage(sizes):
    assert_pipeline_is_plain(make_schedule(*sizes))


def test_layers_may_all_be_frozen():
    """Only what the first stage shares is trained, before layers whose weights are `fixed`."""
    w, x = np.float32([[2.0, 3.0], [0.5, -1.0]]), np.float32([[1.0, 2.0], [3.0, 4.0]])
    stages = Stages(
        first=lambda shared, micro: micro * shared["scale"],
        layer=lambda _, fixed, micro, x: x * fixed,
        last=lambda shared, y, micro: y.sum(),
    )

    def run(shared, fixed, micros):
        found = pipeline_gradients(stages, make_schedule("gpipe", 2, 2), shared, {}, micros, fixed=fixed)
        return comm.all_reduce(found[:2], "pp")

    whole, rows = PartitionSpec(), PartitionSpec("pp")
    on_stages = jax.shard_map(run, mesh=mesh_of(pp=2), in_specs=(whole, rows, whole), out_specs=whole)
    loss, slope = jax.jit(on_stages)({"scale": jnp.float32(1.5)}, w, x)
    np.testing.assert_allclose((loss, slope["scale"]), ((1.5 * x * w[0] * w[1]).sum(), (x * w[0] * w[1]).sum()))


def test_several_layers_a_chunk():
    assert_pipeline_is_plain(make_schedule("zb-v", 2, 3), depth=3)


def random_table(seed: int) -> Schedule:
    """Any stage may run any action that is ready, or idle for no reason."""
    rng = np.random.default_rng(seed)
    placement = ("loop", "v")[seed % 2]
    stages, microbatches = rng.integers(1, 5, 2)
    chunks = 2 if placement == "v" else rng.integers(1, 4)
    empty = Schedule("random", int(stages), int(microbatches), int(chunks), placement)
    todo = {(k, m, p) for k in "FBW" for m in range(microbatches) for p in range(empty.num_parts)}
    done, table = set(), []
    while todo:
        row, after = [None] * empty.num_stages, set()
        for action in rng.permutation(sorted(todo)).tolist():
            kind, micro, part = action[0], int(action[1]), int(action[2])
            needs = {
                "F": {("F", micro, part - 1)} if part else set(),
                "B": {("F", micro, part)} | ({("B", micro, part + 1)} if part + 1 < empty.num_parts else set()),
                "W": {("B", micro, part)},
            }[kind]
            stage, chunk = empty.place(part)
            if needs <= done and row[stage] is None and rng.random() < 0.7:
                row[stage] = Action(Phase[kind], micro, chunk)
                after.add((kind, micro, part))
        done, todo = done | after, todo - after
        table.append(tuple(row))
    return dataclasses.replace(empty, table=tuple(table))


@pytest.mark.parametrize("seed", in_sample(range(6), range(3)))
def test_any_table_that_is_valid(seed):
    assert_pipeline_is_plain(random_table(seed))


def test_a_table_written_by_hand():
    assert_pipeline_is_plain(
        parse(
            """
            name=mine placement=v stages=2 chunks=2 microbatches=1 fused=no
            0: F0 .  .  f0 b0 w0 .  B0 .  W0
            1: .  F0 f0 .  .  b0 B0 w0 W0
            """
        )
    )


# ---- uneven parts, shared weights, tensor parallelism, recomputation ----


def tied_stages(tp: bool) -> Stages:
    """Embedding and head share a table; a layer is one Megatron MLP whose bias is also fixed data's business."""

    def first(shared, micro):
        return jnp.take(shared["table"], micro["tokens"], axis=0) * micro["scale"]

    def layer(weights, fixed, micro, x):
        hidden = jnp.tanh(comm.varying(x, "tp") @ weights["up"]) if tp else jnp.tanh(x @ weights["up"])
        out = hidden @ weights["down"]
        out = comm.all_reduce(out, "tp") if tp else out
        return x + out * fixed + weights["bias"] * micro["scale"]

    def last(shared, x, micro):
        return jax.nn.logsumexp(x @ shared["table"].T, axis=-1).sum() * micro["scale"]

    return Stages(first, layer, last)


def tied_problem(num_layers: int, num_microbatches: int):
    rng = np.random.default_rng(1)
    shared = {"table": rng.normal(size=(11, 8))}
    layers = {
        "up": rng.normal(size=(num_layers, 8, 12)) * 0.3,
        "down": rng.normal(size=(num_layers, 12, 8)) * 0.3,
        "bias": rng.normal(size=(num_layers, 8)),
    }
    micros = {
        "tokens": rng.integers(0, 11, (num_microbatches, 3)),
        "scale": rng.uniform(0.5, 2, num_microbatches),
    }
    return jax.tree.map(jnp.asarray, (shared, layers, rng.uniform(0.5, 1, num_layers), micros))


def tied_plain(shared, layers, fixed, micros):
    stages = tied_stages(tp=False)

    def total(shared, layers):
        def one(micro):
            x = stages.first(shared, micro)
            x, _ = jax.lax.scan(lambda x, row: (stages.layer(*row, micro, x), None), x, (layers, fixed))
            return stages.last(shared, x, micro)

        return sum(one(jax.tree.map(lambda a, m=m: a[m], micros)) for m in range(len(micros["scale"])))

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(shared, layers)


@pytest.mark.parametrize(
    ("name", "parts", "every"),
    [
        *[("1f1b", (1, 3), 0), ("1f1b", (1, 3), 2), ("interleaved", (2, 1, 3, 2), 5)],
        *[("zb-v", (3, 1, 1, 2), 0), ("zb-v", (3, 1, 1, 2), 2)],
    ],
)
def test_uneven_parts_with_tied_weights_tp_and_recomputation(name, parts, every):
    schedule = make_schedule(name, 2, 3)
    with jax.enable_x64(True):
        shared, layers, fixed, micros = tied_problem(sum(parts), 3)
        depth, starts = max(parts), np.cumsum([0, *parts])
        order = [schedule.part(s, c) for s in range(2) for c in range(schedule.num_chunks)]
        rows = np.array([starts[p] + min(i, parts[p] - 1) for p in order for i in range(depth)])
        real = np.array([i < parts[p] for p in order for i in range(depth)])

        def run(shared, layers, fixed, micros):
            stages = tied_stages(tp=True)
            sizes = dict(fixed=fixed, num_layers=parts)
            loss, d_shared, d_layers = pipeline_gradients(
                stages, schedule, shared, layers, micros, recompute_every=every, seed=2.0, **sizes
            )
            again = pipeline_loss(stages, schedule, shared, layers, micros, **sizes)
            return comm.all_reduce((loss, again, d_shared), "pp"), d_layers

        specs = {"up": PartitionSpec("pp", None, "tp"), "down": PartitionSpec("pp", "tp"), "bias": PartitionSpec("pp")}
        everywhere = PartitionSpec()
        stacked = jax.tree.map(lambda w: w[rows], (layers, fixed))
        (loss, again, d_shared), d_layers = jax.jit(
            jax.shard_map(
                run,
                mesh=mesh_of(pp=2, tp=2),
                in_specs=(everywhere, specs, PartitionSpec("pp"), everywhere),
                out_specs=(everywhere, specs),
            )
        )(shared, *stacked, micros)
        expected_loss, (expected_shared, expected_layers) = tied_plain(shared, layers, fixed, micros)
        np.testing.assert_allclose([loss, again], [expected_loss] * 2, rtol=1e-12)
        np.testing.assert_allclose(d_shared["table"], 2 * expected_shared["table"], rtol=1e-10)
        for key, g in d_layers.items():
            np.testing.assert_allclose(g[real], 2 * expected_layers[key][rows[real]], rtol=1e-9, err_msg=key)
            assert not np.asarray(g)[~real].any()


# ---- the split ----


def block_split(mesh: str = "pp=2,tp=2"):
    """The split of one GPT block, and the traced equations of its parts."""
    found = []

    def record(*args):
        found.append(split_layer(*args))
        return found[-1]

    program = build_program(RunConfig(BY_NAME["dp2"].run_config().model, ParallelConfig(mesh=parse_mesh(mesh))),
                            make_mesh(parse_mesh(mesh), DEVICES))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxdist.parallel.pipeline.executor.split_layer", record)
        traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    return found[0], traced


def loop_equations(traced, name: str) -> Counter:
    """Primitive names in the loop of that name."""
    [loop] = [eqn for eqn, *_ in equations(traced.jaxpr) if eqn.params.get("name") == name]
    return Counter(eqn.primitive.name for eqn, *_ in equations(loop.params["jaxpr"]))


def test_a_tensor_parallel_block_splits_8_matmuls_to_b_and_4_to_w_and_its_sums_stay_in_b():
    _, traced = block_split()
    loops = (Loop.LAYERS_FORWARD, Loop.LAYERS_INPUT_GRADIENT, Loop.LAYERS_WEIGHT_GRADIENT)
    parts = [loop_equations(traced, name) for name in loops]
    assert [found["dot_general"] for found in parts] == [6, 8, 4]
    assert [found["psum_invariant"] for found in parts] == [2, 2, 0]


def test_what_a_block_keeps():
    """For each token of a fp32 block: q, k, v and o, two normalised inputs, the MLP's h; and one attention matrix.

    Nothing is kept of the GELU's steps, of probabilities beside their exponentials, or of weights.
    """
    split, _ = block_split("pp=2")
    model = BY_NAME["dp2"].run_config().model
    rows, length, width = 16 // 4, model.seq_len, model.width
    tokens = rows * length
    kept = sum(t.size for t in (*split.b_residuals, *split.w_residuals))
    scalars = 2 * tokens  # of the layer norms
    assert kept == tokens * (6 * width + model.ffn_width) + scalars + rows * model.num_heads * length * (length + 1)
    assert sum(t.size for t in split.b_to_w) == tokens * (7 * width + model.ffn_width)


def test_b_and_w_together_are_the_gradient():
    with jax.enable_x64(True):
        params, inputs, _ = toy(1, 1)
        weights, x = jax.tree.map(lambda p: p[0], params), inputs[0]
        split = split_layer(lambda w, fixed, micro, x: stage_fn(w, x), weights, None, None, x)
        y, pull = jax.vjp(stage_fn, weights, x)
        ours, b_residuals, w_residuals = split.forward(weights, None, None, x)
        dx, b_to_w = split.input_gradient(weights, None, b_residuals, w_residuals, y)
        dw = split.weight_gradient(weights, None, w_residuals, b_to_w)
        expected_dw, expected_dx = pull(y)
        np.testing.assert_allclose(ours, y)
        np.testing.assert_allclose(dx, expected_dx)
        jax.tree.map(np.testing.assert_allclose, dw, expected_dw)


def test_what_two_weights_need_is_handed_to_w_once():
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    split = split_layer(lambda weights, fixed, micro, x: x @ weights[0] + x @ weights[1], (w, w), None, None, x)
    assert [t.shape for t in split.b_to_w] == [x.shape]  # the gradient of the result; x itself waits since F
    assert [t.shape for t in split.w_residuals] == [x.shape]


def test_b_and_w_of_a_layer_with_constants_in_its_pullback():
    def layer(w, fixed, micro, x):
        return w * jnp.sin(2.0 * x) + 3.0

    w, x = jnp.float32(2.0), jnp.linspace(0.0, 1.0, 5)
    split = split_layer(layer, w, None, None, x)
    y, b_residuals, w_residuals = split.forward(w, None, None, x)
    dx, b_to_w = split.input_gradient(w, None, b_residuals, w_residuals, jnp.ones_like(y))
    np.testing.assert_allclose(dx, 4.0 * jnp.cos(2.0 * x), rtol=1e-6)
    np.testing.assert_allclose(split.weight_gradient(w, None, w_residuals, b_to_w), jnp.sin(2.0 * x).sum(), rtol=1e-6)


# ---- what runs is what the table says ----


def pipeline_config(schedule: str, microbatches: int, stages: int = 4, layers: int = 16, **parallel) -> RunConfig:
    model = GPT2Config(layers, 64, 4, 256, 64, 256)
    shape = parse_mesh(f"pp={stages}")
    return RunConfig(
        model,
        ParallelConfig(mesh=shape, schedule=schedule, microbatches=microbatches, **parallel),
        batch_size=2 * microbatches,
    )


@cache
def compiled(config: RunConfig):
    """(traced step, bytes of the buffers, bytes of the compiler's temporaries)."""
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    buffers = sum(named_bytes(traced.jaxpr, tuple(Buffer)).values())
    return program, traced, buffers, traced.lower().compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", in_sample(NAMES, ["interleaved", "zb-v"]))
def test_as_many_ticks_run_as_the_table_has(name):
    config = pipeline_config(name, 6)
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    schedule = config.parallel.pipeline
    ticks = [
        eqn.params["length"] for eqn, _, depth in equations(traced.jaxpr) if eqn.primitive.name == "scan" and not depth
    ]
    assert ticks == [schedule.num_ticks]
    found = step_collectives(program, traced)
    # Messages; around them the tied table, and after them positions and final norm, the loss, and the norm's share.
    kinds = {("permute", PP, 1), ("permute", PP, 0), ("all_reduce", PP, 0)}
    assert {(c.kind, c.axes, c.depth) for c in found} == kinds
    assert sum(c.kind == "all_reduce" for c in found) == 3
    assert max(messages_by_stage(found)) == schedule.num_microbatches * most_boundaries(schedule)


def most_boundaries(schedule) -> int:
    """Boundaries to other stages that the parts of one stage have; its message crosses each once a micro-batch."""
    stages = [schedule.place(part)[0] for part in range(schedule.num_parts)]
    crossed = Counter(stage for pair in pairwise(stages) if pair[0] != pair[1] for stage in pair)
    return max(crossed.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_message_is_sent_when_its_receiver_expects_it_and_no_other(name, forward_only):
    for stages, microbatches in ((2, 3), (3, 7), (4, 4), (5, 9)):
        schedule = make_schedule(name, stages, microbatches)
        lowered = lower(schedule, forward_only=forward_only)
        messages = 0
        for way, (sets, which) in senders_of(lowered.instructions).items():
            expected = getattr(lowered.instructions, way) >= 0
            assert len(which) == len(expected)
            for tick, index in enumerate(which):
                senders = sets[index - 1] if index else ()
                assert {(stage + ARRIVALS[way]) % stages for stage in senders} == set(np.flatnonzero(expected[tick]))
                messages += len(senders)
        crossings = sum(schedule.place(p)[0] != schedule.place(p + 1)[0] for p in range(schedule.num_parts - 1))
        assert messages == microbatches * crossings * (1 if forward_only else 2)


def messages_by_stage(found) -> list[int]:
    """Messages between stages that each of four stages sends in a step."""
    permutes = [c for c in found if c.kind == "permute" and c.depth]
    return [sum(c.count if c.by_stage is None else c.by_stage[stage] for c in permutes) for stage in range(4)]


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_overlap_sends_at_every_tick_what_the_last_one_made(name):
    config = pipeline_config(name, 6, overlap=True)
    schedule = config.parallel.pipeline
    assert schedule.send_latency == 2
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    permutes = [c for c in step_collectives(program, traced) if c.kind == "permute" and c.depth]
    assert [(c.count, c.depth) for c in permutes] == [(schedule.num_ticks, 1)] * 2
    # None of them is inside a branch, or in a loop of a stage's own.
    scan = next(eqn for eqn, *_ in equations(traced.jaxpr) if eqn.primitive.name == "scan")
    body = scan.params["jaxpr"].jaxpr.eqns
    assert sum(eqn.params.get("name", "").startswith(tuple(ARRIVALS)) for eqn in body) == 2


def test_evaluating_sends_forward_alone():
    config = pipeline_config("1f1b", 8)
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    traced = program.evaluate.trace(program.abstract_state().params, program.abstract_batch())
    found = step_collectives(program, traced, evaluate=True)
    assert messages_by_stage(found) == [8, 8, 8, 0]
    assert [c.count for c in found if c.kind != "permute"] == [1]  # the loss


def test_each_action_runs_once_where_the_table_says():
    """Counts carried by the data: every F of a part adds 1 on the way, every W adds 1 to its part's gradient."""
    schedule = make_schedule("zb-v", 4, 6)
    run = jax.jit(
        jax.shard_map(
            pipeline(lambda p, x: x + p, lambda y, target: y.sum(), schedule),
            mesh=mesh_of(pp=4),
            in_specs=(PartitionSpec("pp"), PartitionSpec(), PartitionSpec()),
            out_specs=(PartitionSpec(), PartitionSpec("pp")),
        )
    )
    loss, grads = run(jnp.ones(8), jnp.zeros((6, 1)), jnp.zeros(6))
    assert loss == 6 * 8
    np.testing.assert_array_equal(grads, np.full(8, 6.0))


def test_a_tensor_parallel_pipeline_sends_what_its_layers_send():
    """Loop counts come from the table: every micro-batch through every layer of a stage, forward and backward."""
    strategy = dataclasses.replace(BY_NAME["pp2-tp2-clipped-sgd"], name="", batch_size=48)
    config = strategy.run_config()
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    micro, layers = config.parallel.num_microbatches, config.model.num_layers // 2
    inside = Counter()
    for c in step_collectives(program, traced):
        if c.axes == TP and c.depth == 2:
            inside[c.count] += 1
    # In blocks 2 forward and 2 backward; embedding, softmax (2) and the head's input gradient once a micro-batch.
    assert inside == {micro * layers: 4, micro: 4}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 8), (8, 5)])
def test_buffers_hold_what_is_in_flight(name, stages, microbatches):
    schedule = make_schedule(name, stages, microbatches)
    lowered = lower(schedule)
    assert lowered.num_w_residuals == max(in_flight(schedule))
    assert lowered.num_b_residuals == max(in_flight(schedule, Phase.B))


def test_sums_over_another_axis_work_in_any_stage():
    """A batch split over tp, and a gradient summed over it once, after the pipeline."""
    schedule = make_schedule("zb-h1", 2, 3)

    def layer(params, x):
        mean = comm.all_reduce(x, "tp") / 2
        gathered = comm.all_gather(x, "tp", 0).sum(0, keepdims=True)
        return x + jnp.tanh(x @ params["w"]) + comm.varying(jnp.sin(mean), "tp") + jnp.cos(gathered)

    def run(params, inputs, targets):
        loss, grads = pipeline(layer, loss_fn, schedule)(comm.varying(params, "tp"), inputs, targets)
        return comm.all_reduce((loss, grads), "tp")

    with jax.enable_x64(True):
        rng = np.random.default_rng(3)
        w, (inputs, targets) = jnp.asarray(rng.normal(size=(4, 4, 4))), jnp.asarray(rng.normal(size=(2, 3, 6, 4)))
        halves = PartitionSpec(None, "tp")
        loss, grads = jax.jit(
            jax.shard_map(
                run,
                mesh=mesh_of(pp=2, tp=2),
                in_specs=({"w": PartitionSpec("pp")}, halves, halves),
                out_specs=(PartitionSpec(), {"w": PartitionSpec("pp")}),
            )
        )({"w": w}, inputs, targets)

        def plain(w):
            def one(x, target):
                for part in w:
                    mean = jnp.tile(x.reshape(2, 3, 4).mean(0), (2, 1))
                    x = x + jnp.tanh(x @ part) + jnp.sin(mean) + jnp.cos(x.sum(0, keepdims=True))
                return loss_fn(x, target)

            return sum(one(x, target) for x, target in zip(inputs, targets, strict=True))

        expected_loss, expected = jax.jit(jax.value_and_grad(plain))(w)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
        np.testing.assert_allclose(grads["w"], expected, rtol=1e-9, atol=1e-9)


# ---- memory and compile time ----


@pytest.mark.parametrize(
    ("name", "microbatches"),
    in_sample([("1f1b", 32), ("gpipe", 16), ("interleaved", 8), ("zb-v", 8)], [("zb-v", 8)]),
)
def test_compiled_memory_is_what_in_flight_predicts(name, microbatches):
    """The compiler's temporaries are the buffers and what any schedule needs beside them, known from one 1F1B."""
    _, _, buffers, temp = compiled(pipeline_config("1f1b", 8))
    beside = temp - buffers
    _, _, buffers, temp = compiled(pipeline_config(name, microbatches))
    predicted = buffers + beside
    assert abs(temp - predicted) < 0.05 * temp, f"compiled {temp}, predicted {predicted}, of it buffers {buffers}"


@pytest.mark.exhaustive
def test_memory_of_1f1b_does_not_grow_with_the_micro_batches_and_gpipes_does():
    temps = {
        (name, m): compiled(pipeline_config(name, m))[3]
        for name, m in (("1f1b", 8), ("1f1b", 32), ("gpipe", 8), ("gpipe", 16))
    }
    assert temps["1f1b", 32] < 1.01 * temps["1f1b", 8]
    assert temps["gpipe", 16] > 1.6 * temps["gpipe", 8]


@pytest.mark.exhaustive
def test_the_program_grows_neither_with_micro_batches_nor_with_layers():
    def size(microbatches, layers):
        config = pipeline_config("zb-h1", microbatches, layers=layers)
        program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
        traced = program.step.trace(program.abstract_state(), program.abstract_batch())
        return sum(1 for _ in equations(traced.jaxpr))

    assert size(8, 16) == size(32, 16) == size(8, 64)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "v-min"])
@pytest.mark.parametrize("latency", [1, 2])
def test_forward_alone_runs_each_action_as_soon_as_it_can(name, latency):
    schedule = make_schedule(name, 4, 8, send_latency=latency)
    ticks = {}
    for tick, row in enumerate(forwards(schedule)):
        for stage, action in enumerate(row):
            if action is not None:
                ticks[stage, action] = tick
    assert len(ticks) == 4 * 8 * schedule.num_chunks
    for stage in range(4):
        mine, free = sorted((tick, action) for (at, action), tick in ticks.items() if at == stage), 0
        for tick, action in mine:
            part, ready = schedule.part(stage, action.chunk), 0
            if part:
                before, chunk = schedule.place(part - 1)
                ready = ticks[before, Action(Phase.F, action.microbatch, chunk)] + (1 if before == stage else latency)
            assert tick == max(free, ready)
            free = tick + 1


def test_a_table_that_cannot_run_is_refused_before_it_is_traced():
    good = make_schedule("zb-h1", 2, 2)
    early = dataclasses.replace(good, table=(*good.table[:2], good.table[3], good.table[2], *good.table[4:]))
    with pytest.raises(ConfigError, match="tick 2, stage 0: B of micro-batch 0, chunk 0"):
        lower(early)


def refused(match, stage=lambda p, x: jnp.tanh(x @ p["w"]), sizes=None, specs=None, schedule=None, change=None, **more):
    """Tracing a pipeline of two stages, three micro-batches and two axes ends in one ConfigError."""
    arguments = {"w": jnp.ones((2, 4, 4)), "x": jnp.ones((3, 5, 4)), "t": jnp.ones((3, 5, 4))} | (change or {})
    run = pipeline(stage, more.get("loss", loss_fn), schedule or make_schedule("1f1b", 2, 3))
    w = arguments["w"] if isinstance(arguments["w"], dict) else {"w": arguments["w"]}
    sharded = jax.shard_map(
        run,
        mesh=mesh_of(**(sizes or {"pp": 2, "tp": 2})),
        in_specs=(jax.tree.map(lambda _: PartitionSpec("pp"), w) if specs is None else specs, *[PartitionSpec()] * 2),
        out_specs=(PartitionSpec(), PartitionSpec("pp")),
    )
    with pytest.raises(ConfigError, match=match):
        jax.eval_shape(sharded, w, arguments["x"], arguments["t"])


def test_what_a_library_user_gets_wrong_is_refused_by_name():
    swap = [(0, 1), (1, 0)]
    refused(r"`layer` permutes over", lambda p, x: x + jax.lax.ppermute(comm.varying(x, "tp"), "tp", swap))
    refused("leading sizes 2, 3", change={"t": jnp.ones((2, 5, 4))})
    refused("leading sizes 1, 2", change={"w": {"w": jnp.ones((2, 4, 4)), "b": jnp.ones((4, 4))}})
    refused("no arrays", change={"w": {}})
    refused("for 3 micro-batches", change={"x": jnp.ones((4, 5, 4)), "t": jnp.ones((4, 5, 4))})
    refused("for 3 stages", schedule=make_schedule("1f1b", 3, 3))
    refused("with 2 chunks", schedule=make_schedule("zb-v", 2, 3))
    refused("weights of type int32", change={"w": jnp.ones((2, 4, 4), jnp.int32)})
    refused("which has one rank", schedule=make_schedule("1f1b", 1, 3), sizes={"pp": 1, "tp": 2})
    refused("must return the shape", lambda p, x: (x @ p["w"])[:, :2])
    refused("floating-point", lambda p, x: x, change={"x": jnp.ones((3, 5, 4), jnp.int32)})
    refused("`layer` returns 2 arrays", lambda p, x: (x, x))
    refused("one number", loss=lambda y, t: jnp.square(y - t))
