"""Mixtures of experts, on every mesh, against plain jnp that computes every expert for every token."""

import dataclasses
import functools
import itertools
import math
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from support.messages import assert_equals_trace

from experiments.oracles import decoder_settings
from experiments.oracles.decoder import losses
from jaxdist.checkpoint.logical import PARAMS, fetch, from_logical, to_logical
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape, make_abstract_mesh, make_mesh, parse_mesh
from jaxdist.models.base import declare
from jaxdist.models.context import Context
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.experts import Mixture, Router, apply_gated, choose
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import grouped_kernels as kernels
from jaxdist.parallel.expert_parallel import NOWHERE, apply_experts, kept_places, slots_of_round
from jaxdist.parallel.grouped_matmul import grouped_matmul
from jaxdist.parallel.products import flops_of, product_dims, products_of
from jaxdist.params import named_params
from jaxdist.parity import observe, quick_options
from jaxdist.placement import make_layout
from jaxdist.plan.explain import experts
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.parts import exchanged, work_of
from jaxdist.plan.program_memory import program_bytes
from jaxdist.plan.proof.trace import collectives_of
from jaxdist.plan.search import Candidates, legal_meshes, pipelines, score
from jaxdist.plan.time_model import Efficiency
from jaxdist.runtime.expert_load import FAULTS, broken, copies, counted, counters, summary
from jaxdist.specs import local_bytes
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields(Mixture):
    """Fields of a decoder."""

    kinds: tuple[str, ...] = ("full",)


SMALL = Fields(num_experts=8, top_k=2, expert_width=16)
MIXTURES = {
    "mixtral": SMALL,
    "losses": dataclasses.replace(SMALL, balance_loss=0.1, z_loss=0.01, exchange_room=0.5),  # up to four rounds
    "capacity": dataclasses.replace(SMALL, capacity=0.75, balance_loss=0.1),
    "deepseek": Fields(
        num_experts=8,
        top_k=3,
        expert_width=16,
        router_score="sigmoid",
        routed_scale=2.5,
        shared_width=24,
        balance_loss=0.1,
        z_loss=0.01,
        capacity=1.25,
        balance_rate=0.01,
    ),
    "not-normalised": dataclasses.replace(SMALL, top_k=3, normalised=False),
    "one-choice": dataclasses.replace(SMALL, top_k=1, normalised=False, capacity=1.0),
    "all-chosen": dataclasses.replace(SMALL, num_experts=8, top_k=8),
    "every-other": dataclasses.replace(SMALL, balance_loss=0.1, kinds=("dense", "full")),
}
APART = {"sp": True, "experts_over_tp": True}  # ranks of tp hold different experts
LAYOUTS = {
    "ep2": ("dp=2,ep=2", {}),
    "ep4-zero1": ("dp=4,ep=4", {"zero": 1}),
    "ep8": ("dp=8,ep=8", {"zero": 3}),
    "dp4-ep2-zero3": ("dp=4,ep=2", {"zero": 3}),
    "dp4-ep2-zero2-accumulate": ("dp=4,ep=2", {"zero": 2, "accumulate": 2}),
    "replica2-dp2-ep2-zero3": ("replica=2,dp=2,ep=2", {"zero": 3}),
    "dp2-ep2-tp2-sp": ("dp=2,ep=2,tp=2", {"sp": True, "zero": 1}),
    "dp2-ep2-tp2": ("dp=2,ep=2,tp=2", {"zero": 3, "remat": "block"}),
    "cp2-ep2": ("cp=2,ep=2", {}),
    "dp2-cp2-ep4-zero3": ("dp=2,cp=2,ep=4", {"zero": 3, "cp_kind": "all-gather"}),
    "dp2-cp4-ep2": ("dp=2,cp=4,ep=2", {"zero": 1}),
    "cp2-ep2-tp2-sp": ("cp=2,ep=2,tp=2", {"sp": True, "cp_kind": "ulysses", "remat": "selective"}),
    "pp2-dp2-ep2-zero1": ("pp=2,dp=2,ep=2", {"zero": 1}),
    "pp2-dp2-ep2-zb-v-zero3": ("pp=2,dp=2,ep=2", {"zero": 3, "schedule": "zb-v"}),
    "pp2-ep2-tp2-sp-zb-h1": ("pp=2,dp=2,ep=2,tp=2", {"sp": True, "schedule": "zb-h1", "remat": "block"}),
    "dp4-ep2-overlap-zero3": ("dp=4,ep=2", {"zero": 3, "overlap": True}),
    "dp2-cp2-overlap-remat": ("dp=2,cp=2", {"overlap": True, "remat": "block"}),
    "dp4-ep2-per-parameter": ("dp=4,ep=2", {"zero": 2, "grad_sync": "per-parameter", "loss_chunks": 4}),
    "tp2-only": ("tp=2", {"sp": True}),
    "tp4-apart": ("tp=4", {**APART, "remat": "selective"}),
    "dp2-ep2-tp2-apart": ("dp=2,ep=2,tp=2", {**APART, "zero": 1}),
    "dp4-tp2-apart-overlap-zero3": ("dp=4,tp=2", {**APART, "zero": 3, "overlap": True}),
    "cp2-ep2-tp2-apart-zero3": ("cp=2,ep=2,tp=2", {**APART, "zero": 3, "cp_kind": "all-gather", "remat": "block"}),
    "pp2-ep2-tp2-apart-zb-h1": ("pp=2,dp=2,ep=2,tp=2", {**APART, "schedule": "zb-h1", "zero": 2}),
}
SAMPLE = {
    ("losses", "pp2-dp2-ep2-zero1"),
    ("mixtral", "dp4-ep2-zero3"),
    ("capacity", "dp2-cp2-ep4-zero3"),
    ("deepseek", "dp2-ep2-tp2-apart"),
}
SENT = [
    ("capacity", "dp2-cp2-ep4-zero3"),
    ("deepseek", "dp2-ep2-tp2-apart"),
    ("losses", "dp2-cp2-overlap-remat"),  # the sums of a balance loss are not sent in a forward that runs again
]
UNEVEN = ("every-other", "pp2-dp2-ep2-zb-v-zero3")  # two blocks, for four parts
CASES = [(mixture, layout) for mixture in MIXTURES for layout in LAYOUTS if (mixture, layout) != UNEVEN]
TOLERANCE = 1e-12


def config_of(mixture: Mixture, mesh: str = "", **parallel) -> RunConfig:
    model = DecoderConfig(
        4,
        16,
        4,
        num_kv_heads=2,
        head_dim=4,
        ffn_width=8,
        seq_len=16,
        vocab_size=61,
        qk_norm=True,
        **dataclasses.asdict(mixture),
    )
    layout = ParallelConfig(parse_mesh(mesh), **parallel)
    return RunConfig(model, layout, precision=PrecisionConfig("float64"), batch_size=16)


# ------------------------------------------------------------------------------------------------------- the oracle


@cache
def drawn(mixture: Mixture):
    """(parameters by path, every leaf random, a batch of which a quarter are targets, unevenly over its rows)."""
    config, rng, values = config_of(mixture), np.random.default_rng(0), {}
    for path, param in named_params(declare(config.model)):
        values[path] = param.mean + 0.2 * rng.normal(size=param.shape)
        if param.real is not None:
            values[path][param.real :] = 0
    [batch] = random_batches(config, 1)
    masked = rng.random(batch["targets"].shape) < np.linspace(0.5, 1, len(batch["targets"]))[:, None]
    return values, [batch | {"targets": np.where(masked, -1, batch["targets"])}]


@cache
def expected(mixture: Mixture) -> tuple[float, dict]:
    """(loss, gradients by path) of the oracle."""
    values, [batch] = drawn(mixture)
    with jax.enable_x64(True):
        settings = decoder_settings(config_of(mixture))
        grads, (loss, counts) = jax.jit(jax.grad(lambda p: losses(settings, p, batch), has_aux=True))(values)
    return float(loss), {name: np.asarray(g) for name, g in (grads | counts).items()}


def assert_equals_oracle(mixture: Mixture, config: RunConfig) -> None:
    values, batches = drawn(mixture)
    loss, grads = expected(mixture)
    with jax.enable_x64(True):
        seen = observe(config, DEVICES, batches, values)
    assert seen.losses[0] == pytest.approx(loss, rel=TOLERANCE)
    for name, found in seen.gradients[0].items():
        path, _, layer = name.partition("[")
        wanted = grads[path][int(layer[:-1])] if layer else grads[path]
        error = np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30)
        assert error < TOLERANCE, (name, error)


@pytest.mark.parametrize(("mixture", "layout"), in_sample(CASES, SAMPLE))
def test_a_mesh_equals_every_expert_on_every_token(mixture, layout):
    mesh, parallel = LAYOUTS[layout]
    assert_equals_oracle(MIXTURES[mixture], config_of(MIXTURES[mixture], mesh, **parallel))


def test_rows_that_an_expert_spoils_count_as_its_own():
    """The third and the fifth of five rows, of experts that hold three, none and two; not those that came spoiled."""
    rng = np.random.default_rng(0)
    gate, up, down = (jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32) for _ in range(3))
    rows_ND = jnp.asarray(rng.normal(size=(5, 4)), jnp.float32).at[2:].mul(1e30).at[3].set(jnp.nan)
    spoiled = jax.grad(
        lambda faults_E: apply_gated((gate, up, down, faults_E, jnp.float32(0.5)), rows_ND, jnp.array([3, 0, 2])).sum()
    )(jnp.zeros(3))
    assert spoiled.tolist() == [0.5, 0, 0.5]


def test_a_router_counts_what_it_chose_and_dropped_and_adds_its_z_loss():
    """All by gradients of its counters and its matrix, at a weight of 1/2: the rows themselves pass unchanged."""
    router, rng = Router(nnx.Rngs(0), 3, dataclasses.replace(SMALL, z_loss=0.1, capacity=1.0)), np.random.default_rng(0)
    graph, params = nnx.split(router)
    x_BTD, ctx = jnp.asarray(rng.normal(size=(2, 5, 3)), jnp.float32), Context(weight=jnp.float32(0.5))

    def total(params):
        x_out, expert_BTK, _ = nnx.merge(graph, params)(x_BTD, ctx, 2)
        return x_out.sum(), expert_BTK

    grads, expert_BTK = jax.grad(total, has_aux=True)(nnx.to_pure_dict(params))
    chosen_E = np.bincount(np.ravel(jax.lax.top_k(x_BTD @ router.w[...], 2)[1]), minlength=8)
    kept_E = np.bincount(np.ravel(expert_BTK)[np.ravel(expert_BTK) >= 0], minlength=8)
    assert (kept_E <= 4).all() and kept_E.sum() < 20
    np.testing.assert_allclose(grads["load"], chosen_E / 2)
    np.testing.assert_allclose(grads["dropped"], (chosen_E - kept_E) / 2)
    z = jax.grad(lambda w: 0.05 * jnp.square(jax.nn.logsumexp(x_BTD @ w, axis=-1)).sum())(router.w[...])
    np.testing.assert_allclose(grads["w"], z, rtol=1e-5, atol=1e-6)


def test_a_token_goes_to_the_experts_of_its_highest_scores_and_of_ties_to_the_first():
    scores = jnp.asarray([[[0.1, 0.4, 0.3, 0.4], [0.9, 0.0, 0.8, 0.7]]])
    assert choose(Context(), scores, 2).tolist() == [[[1, 3], [0, 2]]]


def test_the_balance_loss_of_a_router_is_that_of_the_formula():
    """The sum over sequences of T sum_e f_e P_e (DeepSeek-V3, equations 17 to 20); scores need not add up to 1."""
    router, rng = Router(nnx.Rngs(0), 3, dataclasses.replace(SMALL, router_score="sigmoid")), np.random.default_rng(0)
    scores_BTE, wanted = rng.random((2, 5, 8)).astype(np.float32), 0.0
    expert_BTK = np.argsort(-scores_BTE, axis=-1)[..., :2]
    for scores_TE, expert_TK in zip(scores_BTE, expert_BTK, strict=True):
        f_E = 8 / (2 * 5) * np.bincount(expert_TK.ravel(), minlength=8)
        p_E = (scores_TE / scores_TE.sum(-1, keepdims=True)).mean(0)
        wanted += 5 * (f_E * p_E).sum()
    found = router.balance(jnp.asarray(scores_BTE), jnp.asarray(expert_BTK), Context())
    assert float(found) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("mesh", "packed"), in_sample([("", True), ("dp=2,cp=2,ep=2", False)], [("", True)]))
def test_a_balance_loss_is_as_strong_as_its_factor_whatever_is_masked(mesh, packed):
    """What it adds to the gradients, with 1, 1/2, 1/8 and 1/32 of the positions targets, in micro-batches."""
    without, with_loss = SMALL, dataclasses.replace(SMALL, balance_loss=0.1)
    values, [batch] = drawn(SMALL)
    if packed:
        batch = batch | {"starts": np.where(np.arange(16) >= 7, 7, 0).astype(np.int32)[None].repeat(16, 0)}
    places = np.arange(16 * 16).reshape(16, 16)
    targets = np.abs(batch["targets"]) % 61
    batches = [batch | {"targets": np.where(places % share == 0, targets, -1)} for share in (1, 2, 8, 32)]
    seen = []
    for mixture in (without, with_loss):
        still = OptimizerConfig(lr=1e-30, weight_decay=0.0)  # every step has the same parameters
        config = config_of(mixture, mesh, accumulate=2)
        config = dataclasses.replace(config, optimizer=still, mask_documents=packed, steps=len(batches))
        with jax.enable_x64(True):
            found = observe(config, DEVICES, batches, values).gradients
        seen.append([each["blocks.mlp.router.w[1]"] for each in found])
    added = [after - before for before, after in zip(*seen, strict=True)]
    for other in added[1:]:
        assert np.abs(other - added[0]).max() < 1e-11 * np.abs(added[0]).max()


@pytest.mark.parametrize(
    ("mixture", "layout"),
    in_sample([case for case in CASES if case[0] in ("losses", "capacity", "deepseek", "every-other")], SENT),
)
def test_what_is_sent_is_what_is_predicted(mixture, layout):
    mesh, parallel = LAYOUTS[layout]
    assert_equals_trace(config_of(MIXTURES[mixture], mesh, **parallel))


@pytest.mark.parametrize(
    "layout",
    in_sample(["dp4-tp2-apart-overlap-zero3", "pp2-dp2-ep2-zb-v-zero3"], ["pp2-dp2-ep2-zb-v-zero3"]),
)
def test_the_plan_counts_the_state_to_the_byte(layout):
    mesh, parallel = LAYOUTS[layout]
    config = config_of(SMALL, mesh, **parallel)
    columns = Candidates.of(config)
    found = program_bytes(config, columns, pipelines(config, columns), "xla")
    with jax.enable_x64(True):
        state = build_program(config, make_abstract_mesh(config.parallel.mesh)).abstract_state()
    assert found.parameters[0] == local_bytes(state.params)
    assert found.optimizer[0] == local_bytes(state.moments) - 4  # its counter of steps


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "mesh", "apart"),
    [
        # Megatron Core's MoE README, Mixtral 8x7B on 64 H100: TP1 PP4 EP8
        ("mixtral-8x7b", "pp=4,dp=16,ep=8", False),
        # The same of 8x22B on 256: TP4 PP4 EP8, whose experts' width tp splits; and folded, EP8 over TP2 (2504.14960)
        ("mixtral-8x22b", "pp=4,dp=16,ep=8,tp=4", False),
        ("mixtral-8x22b", "pp=8,dp=8,ep=4,tp=2", True),
    ],
)
def test_the_state_of_published_layouts_is_that_of_their_optimizer(name, mesh, apart):
    """Megatron's distributed optimizer: 2 bytes a parameter on every rank that computes with it, and 12 over dp; of an
    expert over dp / ep. Here every stage holds both tables of tokens, where Megatron's ends hold one each."""
    model, shape = PRESETS[name], parse_mesh(mesh)
    parallel = ParallelConfig(shape, zero=1, sp=shape.tp > 1, experts_over_tp=apart)
    config = RunConfig(model, parallel, precision=PrecisionConfig("bfloat16"), batch_size=256)
    columns = Candidates.of(config)
    found = program_bytes(config, columns, pipelines(config, columns), "cudnn")
    work = work_of(model)
    expert = work.expert_parameters / shape.ep / shape.tp
    dense = (work.layer_parameters - work.expert_parameters - model.num_experts) / shape.tp
    table = model.vocab_size * model.width / shape.tp
    layers = model.num_layers / shape.pp
    assert found.parameters[0] == pytest.approx(2 * (layers * (expert + dense) + 2 * table), rel=0.001)
    held = layers * (expert / (shape.dp / shape.ep) + dense / shape.dp) + 2 * table / shape.dp
    assert found.optimizer[0] == pytest.approx(12 * held, rel=0.003)


def test_work_is_that_of_the_experts_that_a_token_chooses():
    model = config_of(SMALL).model
    work, dense = work_of(model), work_of(config_of(Fields()).model)
    expert = 3 * model.width * model.expert_width
    assert work.expert_parameters == 8 * expert and dense.expert_parameters == 0
    router = model.width * model.num_experts
    mlp = 3 * model.width * model.ffn_width
    products = 6 * model.num_layers * (2 * expert + router - mlp)
    # The router's product is in fp32, and none of its own: a dot like the others.
    assert work.flops_per_token - dense.flops_per_token == pytest.approx(products)


def test_tp_sums_nothing_around_experts_that_it_splits():
    work = work_of(config_of(SMALL).model)
    assert (work.layer_sums, work.mixture_sums, work.ring_sums) == (2, 1, 1)
    odd = dataclasses.replace(config_of(SMALL).model, num_experts=7, seq_len=15)  # which no tp splits
    assert (work_of(odd).layer_sums, work_of(odd).mixture_sums) == (2, 0)


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_an_exchange_is_of_the_slots_of_a_round_or_as_capacity_allows(ep):
    model = config_of(SMALL).model
    limited = dataclasses.replace(model, capacity=1.25)
    room, each = slots_of_round(model.seq_len, 2, 8, ep, model.exchange_room), math.ceil(1.25 * 16 * 2 / 8)
    counts = model.num_experts / model.seq_len  # of each expert's rows, beside the rows there
    assert exchanged(model, ep) == 2 * ep * room / model.seq_len * model.width + counts
    whole = dataclasses.replace(model, exchange_room=None)
    assert exchanged(whole, ep) == 2 * ep * min(2, 8 // ep) * model.width + counts
    assert exchanged(limited, ep) == 2 * each * model.num_experts / model.seq_len * model.width


def test_the_search_tries_every_ep_that_divides_experts_and_ranks():
    model = config_of(SMALL).model
    found = {(mesh["dp"], mesh["ep"]) for mesh in legal_meshes(model, 8, 64) if mesh["dp"] == 8}
    assert found == {(8, 1), (8, 2), (8, 4), (8, 8)}
    assert {mesh["ep"] for mesh in legal_meshes(config_of(Fields()).model, 8, 64)} == {1}


# ------------------------------------------------------------------------------------------------------- the routing


def routed(mixture: Mixture, router_DE: np.ndarray, mesh: str = "", **parallel):
    """(observed step, config) where every layer's router is this matrix."""
    config, (values, batches) = config_of(mixture, mesh, **parallel), drawn(mixture)
    routers = np.broadcast_to(router_DE, (config.model.num_layers, *router_DE.shape))
    with jax.enable_x64(True):
        return observe(config, DEVICES, batches, values | {"blocks.mlp.router.w": routers})


@pytest.mark.parametrize(
    ("capacity", "mesh"),
    in_sample(itertools.product((None, 1.0), ("", "dp=2,ep=2,tp=2", "dp=2,cp=2,ep=4")), [(1.0, "dp=2,ep=2,tp=2")]),
)
def test_ties_go_to_the_first_experts_on_every_mesh_and_others_have_no_gradient(mesh, capacity):
    """A router of zeros: all experts tie, the first two take every token, and the others none."""
    mixture = dataclasses.replace(SMALL, capacity=capacity)
    seen, alone = (routed(mixture, np.zeros((16, 8)), where) for where in (mesh, ""))
    for name, found in seen.gradients[0].items():
        assert np.isfinite(found).all(), name
        np.testing.assert_allclose(found, alone.gradients[0][name], atol=1e-14)
        if "mlp.w_" in name:
            assert np.abs(found[:2]).min(axis=(1, 2)).all() and not found[2:].any(), name


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [2, 2, 2, 2], [1, 700, 0, 3]])
def test_a_grouped_product_is_each_groups_own(counts):
    rng, size = np.random.default_rng(0), sum(counts) + 3
    x, w = rng.normal(size=(size, 5)), rng.normal(size=(4, 5, 7))
    x[sum(counts) :] = 0
    groups = np.repeat(np.arange(4), counts)

    def plain(x, w):
        return jnp.concatenate([jnp.einsum("ni,nif->nf", x[: len(groups)], w[groups]), jnp.zeros((3, 7))])

    d = rng.normal(size=(size, 7))
    d[sum(counts) :] = 0
    with jax.enable_x64(True):
        found, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray(counts)), x, w)
        wanted, pull_plain = jax.vjp(plain, x, w)
        np.testing.assert_allclose(found, wanted, atol=1e-12)
        for mine, theirs in zip(pull(jnp.asarray(d)), pull_plain(jnp.asarray(d)), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-11)


def test_bfloat16_weights_get_sums_that_were_made_in_fp32():
    x, w = jnp.ones((600, 1), jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16)
    dw = jax.grad(lambda w: grouped_matmul(x, w, jnp.asarray([600])).astype(jnp.float32).sum())(w)
    assert dw[0, 0, 0] == 600  # in bfloat16 256 + 1 is 256


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [130, 0, 257, 64], [0, 128, 0, 256]])
@pytest.mark.parametrize("depth, width, order", [(192, 256, 1), (128, 64, -1)])
def test_the_kernels_of_a_gpu_are_each_groups_own_in_any_order_of_blocks(counts, depth, width, order, monkeypatch):
    blocks = kernels._blocks
    monkeypatch.setattr(kernels, "_blocks", lambda *args: blocks(*args)[:, ::order])
    rng, size, groups = np.random.default_rng(0), sum(counts) + 3, np.repeat(np.arange(4), counts)
    x, w, dy = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((size, depth), (4, depth, width), (size, width))
    )
    assert kernels.runs_on_kernels(x, w, dy) and not kernels.runs_on_kernels(x[:, 1:], w)
    x64, w64, dy64 = (np.asarray(each, np.float64) for each in (x, w, dy))
    own = len(groups)
    run = {"counts_E": jnp.asarray(counts), "interpret": True}
    dw = np.zeros(w.shape)
    np.add.at(dw, groups, x64[:own, :, None] * dy64[:own, None])
    for found, wanted in (
        (kernels.row_products(x, w, transposed=False, **run), np.einsum("nk,nkf->nf", x64[:own], w64[groups])),
        (kernels.row_products(dy, w, transposed=True, **run), np.einsum("nf,nkf->nk", dy64[:own], w64[groups])),
        (kernels.outer_products(x, dy, **run), dw),
    ):
        found = np.asarray(found, np.float64)
        np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=2**-8, atol=1e-4)
        assert not found[len(wanted) :].any()


@pytest.mark.parametrize("dtype, kernels_run", [(jnp.bfloat16, 3), (jnp.float32, 0)])
def test_products_of_16_bits_lower_to_kernels_on_a_gpu_and_to_loops_elsewhere(dtype, kernels_run):
    def both(x, w, counts):
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, counts[0]), x, w)
        return y, pull(y)

    mesh = make_abstract_mesh(MeshShape(dp=2))
    if hasattr(jax.sharding, "AbstractDevice"):  # newer versions of JAX want to know which card
        card = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
        mesh = mesh.update(abstract_device=card)
    by_rank, everywhere = PartitionSpec("dp"), PartitionSpec()
    specs = (by_rank, everywhere, by_rank)
    shapes = [((512, 128), dtype), ((4, 128, 64), dtype), ((2, 4), jnp.int32)]
    args = [
        jax.ShapeDtypeStruct(*of, sharding=NamedSharding(mesh, spec)) for of, spec in zip(shapes, specs, strict=True)
    ]
    step = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=(by_rank, (by_rank, everywhere))))
    traced = step.trace(*args)
    for platform, found in (("cuda", kernels_run), ("cpu", 0)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert (text.count("xla.gpu.triton"), text.count("stablehlo.while")) == (found, 3 - found)


def alternating(*choices: tuple[int, int]) -> np.ndarray:
    return np.array(choices * (32 // len(choices)))


ROUTES = {  # of 32 tokens, 8 on each of 4 ranks that hold 2 experts each
    "drawn": np.argsort(np.random.default_rng(1).random((32, 8)), axis=1)[:, :2],
    "even": alternating((0, 2), (4, 6), (1, 3), (5, 7)),
    "to one expert": alternating((3, NOWHERE)),
    "to one rank": alternating((5, 4)),
    "an empty expert and an empty rank": alternating((0, 4), (4, 5), (5, 0), (4, 0)),
    "nowhere": alternating((NOWHERE, NOWHERE)),
    "from one rank": np.where(np.arange(32)[:, None] < 8, (7, 6), NOWHERE),
}


@pytest.mark.parametrize("room", [0.25, 0.7, 2.0, None])
def test_an_exchange_takes_as_many_rounds_as_its_fullest_message_and_drops_nothing(room):
    rng, mesh = np.random.default_rng(0), parse_mesh("dp=4,ep=4")
    x_RD, w_EDF, weight_RK, dy_RD = (rng.normal(size=shape) for shape in ((32, 3), (8, 3, 3), (32, 2), (32, 3)))
    rounds = []

    def experts(w_EDF, rows_ND, counts_E):
        jax.debug.callback(lambda: rounds.append(1))
        return jnp.tanh(grouped_matmul(rows_ND, w_EDF, counts_E))

    def exchanged(x_RD, w_EDF, expert_RK, weight_RK):
        return apply_experts(experts, w_EDF, x_RD, expert_RK, weight_RK, 8, mesh.expert_axes, room)

    def plain(x_RD, w_EDF, expert_RK, weight_RK):
        rows = jnp.tanh(jnp.einsum("rd,rkdf->rkf", x_RD, w_EDF[expert_RK]))
        return jnp.einsum("rkf,rk->rf", jnp.where(expert_RK[..., None] < 0, 0, rows), weight_RK)

    def gradients(function, x_RD, w_EDF, expert_RK, weight_RK, dy_RD):
        of = lambda x, w, weight: function(x, w, expert_RK, weight)  # noqa: E731
        return jax.vjp(of, x_RD, w_EDF, weight_RK)[1](dy_RD)

    by_rank = PartitionSpec("ep")
    on_mesh = functools.partial(jax.shard_map, mesh=make_mesh(mesh, DEVICES[:4]), check_vma=True)
    with jax.enable_x64(True):
        run = jax.jit(on_mesh(exchanged, in_specs=by_rank, out_specs=by_rank))
        pull = jax.jit(on_mesh(functools.partial(gradients, exchanged), in_specs=by_rank, out_specs=by_rank))
        for name, expert_RK in ROUTES.items():
            rounds.clear()
            args = x_RD, w_EDF, expert_RK, weight_RK
            np.testing.assert_allclose(run(*args), plain(*args), atol=1e-12, err_msg=name)
            jax.effects_barrier()
            sent = [np.bincount(e[e >= 0] // 2, minlength=4).max() for e in np.split(expert_RK, 4)]
            slots = slots_of_round(8, 2, 8, 4, room)
            assert len(rounds) == 4 * max(1, math.ceil(max(sent) / slots)), name
            for found, wanted in zip(pull(*args, dy_RD), gradients(plain, *args, dy_RD), strict=True):
                np.testing.assert_allclose(found, wanted, atol=1e-12, err_msg=name)


def test_every_round_sends_as_much_as_the_first():
    mesh, by_rank = parse_mesh("dp=4,ep=4"), PartitionSpec("ep")
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((32, 5), "f4"), ((32, 2), "i4"), ((32, 2), "f4"))
    ]

    def exchanged(x_RD, expert_RK, weight_RK):
        return apply_experts(lambda _, rows, counts: rows, (), x_RD, expert_RK, weight_RK, 8, mesh.expert_axes, 0.75)

    on_mesh = jax.shard_map(exchanged, mesh=make_abstract_mesh(mesh), in_specs=by_rank, out_specs=by_rank)
    jaxpr = jax.make_jaxpr(on_mesh)(*arrays)
    for rounds in (1, 2, 5):
        sent = collectives_of(jaxpr, mesh, rounds=rounds)
        rows = [c.count * c.full_bytes for c in sent if c.full_bytes > 100]
        assert sum(rows) == rounds * 2 * (4 * 3) * 5 * 4  # there and back: 3 slots for each of 4 ranks, 5 wide
        assert [c.full_bytes for c in sent if c.full_bytes <= 100] == [8 * 4, 4]  # counts, and the number of rounds


def test_products_are_those_of_the_first_round():
    """In a traced program as a plan counts them, forward and backward: later rounds are rare."""
    mesh, by_rank = parse_mesh("dp=4,ep=4"), PartitionSpec("ep")
    shapes = ((32, 5), "f4"), ((32, 2), "i4"), ((32, 2), "f4"), ((8, 5, 5), "f4")
    found = {}
    for room in (0.75, None):

        def exchanged(x_RD, expert_RK, weight_RK, w_EDF, room=room):
            def product(w_EDF, rows_ND, counts_E):
                return grouped_matmul(rows_ND, w_EDF, counts_E)

            y, pull = jax.vjp(
                lambda x, w: apply_experts(product, w, x, expert_RK, weight_RK, 8, mesh.expert_axes, room), x_RD, w_EDF
            )
            return pull(y)

        on_mesh = jax.shard_map(exchanged, mesh=make_abstract_mesh(mesh), in_specs=by_rank, out_specs=by_rank)
        jaxpr = jax.make_jaxpr(on_mesh)(*(jax.ShapeDtypeStruct(*each) for each in shapes))
        found[room] = [*products_of(jaxpr)]
        assert flops_of(jaxpr) == sum(2 * math.prod(product_dims(eqn)) for eqn in found[room])
    assert len(found[0.75]) == len(found[None]) == 3


def test_a_round_has_room_for_an_even_share_and_some_or_for_everything():
    sizes = (8192, 8, 128)  # tokens of a rank, choices, experts
    assert slots_of_round(*sizes, 16, 1.5) == 1.5 * 8192 * 8 / 16
    assert slots_of_round(*sizes, 16, None) == 8192 * 8
    assert slots_of_round(*sizes, 2, 1.5) == 8192 * 8  # half of which is less than 1.5 times an even share
    assert slots_of_round(*sizes, 1, 1.5) == 8192 * 8
    assert slots_of_round(5, 2, 8, 8, 0.01) == 1


def test_first_choices_come_before_second_ones_and_earlier_tokens_before_later():
    # tokens x choices; expert 0 is everybody's, and has room for three
    expert = jnp.asarray([[[1, 0], [0, 2], [0, 1], [2, 0]]])
    assert kept_places(expert, 3, 3).tolist() == [[[0, 2], [0, 1], [1, 1], [0, -1]]]


def test_experts_are_a_refactorisation_of_the_data_ranks():
    for text, devices, sizes in (
        ("dp=2,ep=2", 2, {"dp": 1, "ep": 2, "cp": 1}),
        ("dp=8,ep=2", 8, {"dp": 4, "ep": 2, "cp": 1}),
        ("dp=4,cp=2,ep=4", 8, {"dp": 2, "ep": 2, "cp": 2}),
        ("dp=4,cp=2,ep=2", 8, {"dp": 4, "ep": 1, "cp": 2}),
        ("dp=2,cp=4,ep=2", 8, {"dp": 1, "ep": 2, "cp": 4}),
    ):
        mesh = parse_mesh(text)
        assert mesh.num_devices == devices and parse_mesh(str(mesh)) == mesh
        assert {axis: mesh.size(axis) for axis in sizes} == sizes
        assert dict(make_mesh(mesh, DEVICES).shape) | sizes == dict(make_mesh(mesh, DEVICES).shape)


EVEN, FIRST, LAST = [(t % 4, (t + 1) % 4) for t in range(8)], [(0, 1)] * 8, [(2, 3)] * 8
LOADS = {
    "each two equally often": [[EVEN, EVEN], [EVEN, EVEN]],
    "the same two for all tokens": [[FIRST, FIRST], [FIRST, FIRST]],
    "other two in the second layer": [[FIRST, FIRST], [LAST, LAST]],
    "other two in the second sequence": [[FIRST, LAST], [FIRST, LAST]],
}


def loaded(case: str):
    """(the experts that are chosen, all logits, transformers' balance loss by its formula)."""
    chosen = np.array(LOADS[case])  # [layer, sequence, position, choice]
    logits = 4 * np.eye(4, dtype=np.float32)[chosen].sum(-2)
    shares, fractions = jax.nn.softmax(logits).mean((0, 1, 2)), np.eye(4)[chosen].sum(-2).mean((0, 1, 2))
    return chosen, logits, 4 * float((shares * fractions).sum())


@pytest.mark.exhaustive
def test_the_balance_loss_is_another_than_that_of_transformers_as_the_page_says():
    router = Router(nnx.Rngs(0), 8, Mixture(num_experts=4, top_k=2))
    mesh, spec = make_mesh(MeshShape(), DEVICES[:1]), PartitionSpec()
    of_layer = lambda scores, chosen: router.balance(scores, chosen, Context())  # noqa: E731
    balance = jax.jit(jax.shard_map(of_layer, mesh=mesh, in_specs=spec, out_specs=spec))
    page = (Path(__file__).parents[2] / "docs/experts.md").read_text(encoding="utf-8")
    for case in LOADS:
        chosen, logits, theirs = loaded(case)
        num_layers, num_tokens = len(chosen), chosen[0, ..., 0].size
        ours = sum(float(balance(jax.nn.softmax(x), c)) for x, c in zip(logits, chosen, strict=True)) / num_tokens
        assert f"| {case} | {theirs:.2f} | {ours * 2 / num_layers:.2f} |" in page, (theirs, ours)
    model = PRESETS["mixtral-8x7b"]
    assert f"--balance-loss {0.001 * model.top_k / model.num_layers:.7f}`" in page


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", LOADS)
def test_the_formula_of_transformers_is_theirs(case):
    torch = pytest.importorskip("torch", reason="pip install -e '.[oracle]'")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral", reason="pip install -e '.[oracle]'")
    _, logits, expected = loaded(case)
    found = mixtral.load_balancing_loss_func(tuple(torch.tensor(each.reshape(-1, 4)) for each in logits), 4, 2)
    assert float(found) == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------------------------------- what a step counts


def one_step(config: RunConfig, values: dict, batch) -> tuple:
    """(program, state, metrics) after a step from these parameters."""
    mesh = make_mesh(config.parallel.mesh, DEVICES[: config.parallel.mesh.num_devices])
    program = build_program(config, mesh, compiler_options=quick_options(mesh))
    state = from_logical(program, {f"{PARAMS}.{name}": x for name, x in values.items()})
    return program, *program.step(state, program.put(batch))


@pytest.mark.parametrize("mesh", ["dp=4,ep=4", "dp=2,ep=2,tp=2", "pp=2,dp=2,ep=2"])
def test_an_expert_that_makes_a_nan_is_named_with_its_layer_and_rank(mesh):
    config = config_of(SMALL, mesh)
    values, [batch] = drawn(SMALL)
    w_up = values["blocks.mlp.w_up"].copy()
    w_up[2, 5, 0, 0] = np.nan
    with jax.enable_x64(True):
        program, state, metrics = one_step(config, values | {"blocks.mlp.w_up": w_up}, batch)
        assert not np.isfinite(metrics["loss"])
        counts = counted(program.layout, copies(program.layout, state.params), batch["inputs"].size)
        unchanged = fetch(to_logical(program, state))["params.blocks.mlp.w_down"]
    np.testing.assert_array_equal(unchanged, values["blocks.mlp.w_down"])
    held = {"dp=4,ep=4": "ep=2", "dp=2,ep=2,tp=2": "ep=1", "pp=2,dp=2,ep=2": "ep=1"}[mesh]
    assert broken(program.layout, counts, num_kinds=1) == [f"expert 5 of layer 2 (held by {held})"]


def test_a_bias_goes_up_where_an_expert_has_less_than_the_mean_and_down_where_more():
    mixture = dataclasses.replace(SMALL, balance_rate=0.125)
    found = []
    for mesh in ("", "dp=4,ep=2"):
        config = config_of(mixture, mesh, **({"zero": 3} if mesh else {}))
        values, [batch] = drawn(mixture)
        with jax.enable_x64(True):
            program, state, _ = one_step(config, values, batch)
            load = counted(program.layout, copies(program.layout, state.params), batch["inputs"].size)[
                "blocks.mlp.router.load"
            ]
            bias = fetch(state.params["blocks"]["mlp"]["router"]["bias"])
        above = np.sign(np.round(load - load.mean(-1, keepdims=True), 9))
        np.testing.assert_allclose(bias, values["blocks.mlp.router.bias"] - 0.125 * above, atol=1e-15)
        found.append(load)
    np.testing.assert_allclose(*found, atol=1e-9)
    assert found[0].sum(-1) == pytest.approx(2 * batch["inputs"].size)


def test_counts_are_no_part_of_the_gradient_s_norm():
    config, (values, batches) = config_of(SMALL, "dp=4,ep=2"), drawn(SMALL)
    with jax.enable_x64(True):
        seen = observe(config, DEVICES, batches, values)
    counts = {name for name, param in named_params(declare(config.model)) if param.update == "count"}
    squares = [np.square(g).sum() for name, g in seen.gradients[0].items() if name.partition("[")[0] not in counts]
    assert seen.norms[0] == pytest.approx(math.sqrt(sum(squares)), rel=TOLERANCE)


def test_what_is_counted_is_summed_up_over_layers():
    """The busiest rank is told where several hold different experts: of 8 here, 2 on each of 4."""
    counts = {"a.load": np.array([[1.0, 3, 2, 2, 2, 2, 2, 2], [6] * 8]), "a.dropped": np.array([[0.0, 8], [0, 0]])}
    said = {"expert_load_max": 1.5, "expert_load_min": 0.5, "expert_dropped": 0.125}
    for mesh, more in (("", {}), ("dp=2", {}), ("dp=4,ep=4", {"expert_rank_load_max": 1.0})):
        config = config_of(SMALL, mesh)
        layout = make_layout(config.model, config.parallel, config.part_layers)
        assert summary(layout, counts) == said | more and summary(layout, {}) == {}
    assert summary(layout, {"a.load": np.array([[3.0, 3, 0, 0, 1, 1, 0, 0]])})["expert_rank_load_max"] == 3
    dense = make_layout(PRESETS["llama-proof"], ParallelConfig())  # as a model that counts in its own way
    assert summary(dense, counts) == said


def test_a_plan_says_what_a_token_uses_and_what_is_padding():
    model, cluster = PRESETS["mixtral-8x7b"], Cluster(find_hardware("h200"), 8)
    parallel = ParallelConfig(parse_mesh("dp=64,ep=8"), zero=3, remat="block")
    config = RunConfig(model, parallel, precision=PrecisionConfig("bfloat16"), batch_size=64)
    found = score(config, Candidates.of(config), cluster, "cudnn")
    used, sent = experts(found, 0, np.array([0]), "cudnn", Efficiency())
    assert used == "A token uses 12.88 billion of 46.7 billion parameters; 45.1 billion are of experts."
    assert sent.startswith("ep=8 sends tokens to experts: ")
    assert "even 67% of that is of chosen tokens" in sent and "twice its share, 2 rounds send 2 times as much" in sent


def small(mesh: str = "", **fields) -> RunConfig:
    return config_of(dataclasses.replace(SMALL, **fields), mesh)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_mesh("dp=4,ep=3"), r"ep=3 over dp=4: .* Use ep in \[1, 2, 4\]"),
        (lambda: parse_mesh("ep=2"), r"ep=2 over dp=1: .* Use ep in \[1\]"),
        (lambda: parse_mesh("dp=2,cp=2,ep=8"), r"ep=8 over dp=2 and cp=2: .* Use ep in \[1, 2, 4\]"),
        (lambda: small(num_experts=4, top_k=5), "top_k=5 with num_experts=4: .* Use top_k up to 4"),
        (lambda: small(top_k=0), "top_k=0"),
        (lambda: small(router_score="tanh"), "router_score='tanh': .* softmax or sigmoid"),
        (lambda: small(capacity=0.2), "capacity=0.2: .* 0.8. .* capacity=0.25"),
        (lambda: small(capacity=-1.0), "capacity=-1"),
        (lambda: small(z_loss=-1.0), "z_loss=-1"),
        (lambda: small(exchange_room=0.0), "exchange_room=0.0: must be a number above 0"),
        (lambda: small(exchange_room=2.0, capacity=1.0), "exchange_room=2.0 with capacity=1.0: .* Leave one"),
        (lambda: small("dp=4,ep=4", num_experts=6), "6 experts: .* Use ep in .1, 2, 3"),
        (lambda: small("tp=4", expert_width=6), "expert_width=6 cannot be split over tp=4"),
        (lambda: ParallelConfig(parse_mesh("tp=4"), experts_over_tp=True), "experts_over_tp=True: .* Add sp=True"),
        (
            lambda: config_of(SMALL, "dp=4,ep=4,tp=4", **APART),
            "ep=4 and experts_over_tp=True with 8 experts: each of 16 .* Use ep x tp in .1, 2, 4, 8",
        ),
        (lambda: config_of(Fields(), "tp=4", **APART), "ep x tp"),
        (lambda: config_of(Fields(capacity=1.0)), "capacity=1.0"),
        (
            lambda: dataclasses.replace(config_of(Fields()).model, kinds=("dense",)),
            r"kinds=\('dense',\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_three_parts(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_ep_needs_experts():
    dense = config_of(Fields()).model
    with pytest.raises(ConfigError, match="ep=2"):
        RunConfig(dense, ParallelConfig(parse_mesh("dp=2,ep=2")), batch_size=8)


def test_a_broken_expert_is_named_with_its_layer_where_kinds_take_turns():
    config = config_of(MIXTURES["every-other"])
    layout = make_layout(config.model, config.parallel)
    [leaf] = [leaf for leaf in counters(layout) if leaf.name.endswith(FAULTS)]
    faults = np.zeros(leaf.shape)
    faults[1, 5] = 3
    assert broken(layout, {leaf.name: faults}, num_kinds=2) == ["expert 5 of layer 3"]
