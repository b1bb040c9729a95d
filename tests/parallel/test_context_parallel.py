"""Attention over a split sequence equals attention over a whole one, forward and backward, however it is split."""

import itertools
import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape, make_mesh, parse_mesh
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.parallel import blocked_attention as blocked
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import context_parallel, exchange
from jaxdist.parallel.blocked_attention import Places, blocked_attention
from jaxdist.parallel.context_parallel import by_turns, context_attention, hops, neighbours
from jaxdist.parallel.sequence import Split
from jaxdist.plan.proof.compile import emitted_collectives
from jaxdist.plan.proof.trace import collectives_of, equations, total_sent
from jaxdist.strategy import ParallelConfig
from jaxdist.verification import verify_model

B, S, N, H = 2, 64, 8, 4
# ranks, exchanging, gathers, swaps
SPLITS = {
    "ring-2": (2,),
    "ring-4": (4,),
    "ring-8": (8,),
    "all-gather-2": (2, 1, True),
    "all-gather-8": (8, 1, True),
    "ulysses-2": (2, 2),
    "ulysses-4": (4, 4),
    "ulysses-8": (8, 8),
    "usp-2-of-4": (4, 2),
    "usp-2-of-8": (8, 2),
    "usp-4-of-8": (8, 4),
    "swaps-2": (2, 1, False, True),
    "swaps-4": (4, 1, False, True),
    "swaps-8": (8, 1, False, True),
    "swaps-usp-2-of-8": (8, 2, False, True),
}
# kv heads, window, documents
MASKS = {
    "causal": (8, None, False),
    "grouped": (2, None, False),
    "one-key-head": (1, None, False),
    "window-1": (2, 1, False),
    "window-5": (8, 5, False),
    "window-of-a-chunk": (2, 17, False),
    "window-over-shards": (2, 41, False),
    "packed": (2, None, True),
    "packed-window": (8, 12, True),
}
SAMPLE = {
    ("ring-4", "packed", 4),
    ("ring-4", "window-over-shards", 4),
    ("all-gather-8", "packed-window", 4),
    ("ulysses-4", "grouped", 4),
    ("usp-4-of-8", "one-key-head", 512),
    ("swaps-4", "packed", 512),
    ("swaps-4", "packed-window", 512),
    ("swaps-usp-2-of-8", "grouped", 4),
}
CASES = in_sample(itertools.product(SPLITS, MASKS, (512, 4)), SAMPLE)


def starts_of(documents: bool) -> np.ndarray | None:
    """Where each position's document begins: cuts that no shard's border has anything to do with."""
    if not documents:
        return None
    starts = np.zeros((B, S), np.int32)
    for row, cuts in enumerate([(7, 20, 41), (1, 33, 62)]):
        for cut in cuts:
            starts[row, cut:] = cut
    return starts


def attention_in_numpy(q, k, v, window, starts):
    """The whole matrix of scores, in float64. q[B, S, N, H], k, v[B, S, K, H]."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    query, key = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    seen = (query >= key) & (query - key < (window or S))
    seen = seen & (key >= (0 if starts is None else starts[:, None, :, None]))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), v)


def order_of(split: Split, length: int = S) -> np.ndarray:
    """The position of everything, rank after rank."""
    local = length // split.ranks
    return np.concatenate([np.asarray(split.place(jnp.arange(local), local, rank)) for rank in range(split.ranks)])


def on_ranks(split: Split, window=None, starts=None):
    """attention(q, k, v) of arrays that are placed as `order_of` says."""
    mesh = make_mesh(MeshShape(cp=split.ranks), DEVICES[: split.ranks])

    def local(q, k, v):
        def whole(q, k, v):
            return blocked_attention(q, k, v, Places(0, 0, starts), window)

        return context_attention(split, whole, q, k, v, window=window, starts_BS=starts)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"), check_vma=True))


@cache
def arrays(kv_heads: int):
    rng = np.random.default_rng(kv_heads)
    q, do = rng.normal(size=(2, B, S, N, H))
    return q, *rng.normal(size=(2, B, S, kv_heads, H)), do


@pytest.mark.parametrize("split, mask, block", CASES)
def test_values_and_gradients_are_those_of_the_whole_sequence(monkeypatch, split, mask, block):
    monkeypatch.setattr(blocked, "MOST_POSITIONS", block)
    split, (kv_heads, window, documents) = Split(*SPLITS[split]), MASKS[mask]
    with jax.enable_x64(True):
        *inputs, do = arrays(kv_heads)
        starts, order = starts_of(documents), order_of(split)
        assert sorted(order) == [*range(S)]
        found, back = jax.vjp(on_ranks(split, window, starts), *(x[:, order] for x in inputs))
        expected, back_whole = jax.vjp(lambda *x: attention_in_numpy(*x, window, starts), *inputs)
        grads, whole_grads = back(do[:, order]), back_whole(do)
    for ours, theirs in zip((found, *grads), (expected, *whole_grads), strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)[:, order]
        assert ours.dtype == np.float64
        assert np.abs(ours - theirs).max() <= 1e-13 * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("name", ["ring-8", "all-gather-8", "usp-2-of-8", "ulysses-8"])
def test_16_bit_attention_is_summed_in_32(name):
    """Errors are those of rounding inputs and results, whatever the number of ranks."""
    split, (q, k, v, _) = Split(*SPLITS[name]), arrays(2)
    order = order_of(split)
    q, k, v = (jnp.asarray(x[:, order], jnp.bfloat16) for x in (q, k, v))
    back_in_order = np.argsort(order)
    ours = np.asarray(on_ranks(split)(q, k, v), np.float32)[:, back_in_order]
    inputs = (np.asarray(x, np.float32)[:, back_in_order] for x in (q, k, v))
    assert np.abs(ours - attention_in_numpy(*inputs, None, None)).max() < 2**-7


def test_a_window_is_a_halo_where_it_takes_fewer_messages_than_a_ring():
    """Chunks of 8 in four groups, whose ring has three hops; a position sees itself too."""
    assert [hops(window, 8, 4) for window in (None, 1, 2, 9, 10, 17, 18)] == [None, 0, 1, 1, 2, 2, None]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_zig_zag_gives_every_rank_as_many_scores(ranks):
    order = order_of(Split(ranks), 4 * 2 * ranks).reshape(ranks, -1)
    assert len({int((positions + 1).sum()) for positions in order}) == 1


@pytest.mark.parametrize("split", [Split(4), Split(4, 2), Split(8, 2), Split(8, 4), Split(4, 4)], ids=str)
def test_a_rank_has_its_chunks_and_all_together_the_sequence(split):
    """Rank after rank: of groups in a zig-zag the first and the last chunk that is left, divided among their ranks."""
    whole = np.arange(2 * 8 * split.ranks).reshape(2, -1)
    on_mesh = jax.shard_map(
        lambda x: (split.cut(x), split.gather(split.cut(x))[None]),
        mesh=make_mesh(MeshShape(cp=split.ranks), DEVICES),
        in_specs=P(),
        out_specs=(P(None, "cp"), P("cp")),
    )
    held, back = jax.jit(on_mesh)(whole)
    chunks = np.split(np.arange(whole.shape[1]), 2 * split.groups)
    order = np.concatenate([np.concatenate([chunks[g], chunks[-1 - g]]) for g in range(split.groups)])
    np.testing.assert_array_equal(held, whole[:, order])
    assert (np.asarray(back) == whole).all()


def test_layers_in_a_loop_keep_nothing_as_large_as_scores(monkeypatch):
    """JAX computes what no layer changes before the loop over layers: masks, unless they depend on the queries."""
    monkeypatch.setattr(blocked, "MOST_POSITIONS", 8)
    layer, (q, *_) = on_ranks(Split(4)), arrays(8)

    def loss(q):
        return jnp.sum(jax.lax.scan(lambda q, _: (layer(q, q, q), None), q, length=3)[0])

    for function in (loss, jax.checkpoint(loss)):
        shapes = [v.aval.shape for eqn, *_ in equations(jax.make_jaxpr(jax.grad(function))(q)) for v in eqn.outvars]
        assert max(shape.count(8) for shape in shapes) >= 3  # the scores of a block and its heads
        assert not [shape for shape in shapes if shape[-2:] == (8, 8) and len(shape) > 5]


@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_swap_inside_loops_of_which_stages_run_unequally_many(odd):
    """What a permute cannot do on XLA:CPU, where all devices of the mesh join it: another stage's would be missing."""
    stages, pairs = 2, neighbours(Split(4, swaps=True), odd)
    mesh = make_mesh(MeshShape(pp=stages, cp=4), DEVICES)

    def local(x):
        times = comm.varying(2 * comm.rank("pp") + 1, ("pp", "cp"))
        start = comm.varying(jnp.int32(0), ("pp", "cp"))
        return lax.while_loop(
            lambda state: state[0] < times,
            lambda state: (state[0] + 1, 2 * exchange.swap(state[1], "cp", pairs)),
            (start, x),
        )[1]

    both = P(("pp", "cp"))
    x = np.arange(8.0, dtype=np.float32)
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=both, out_specs=both, check_vma=True))(x)
    partner = dict(pairs) | {b: a for a, b in pairs}
    expected = [2 ** (2 * stage + 1) * (4.0 * stage + partner[rank]) for stage in range(stages) for rank in range(4)]
    np.testing.assert_array_equal(found, expected)


def sent(function, *args, ranks: int) -> int:
    mesh = MeshShape(cp=ranks)
    return total_sent(collectives_of(jax.jit(function).trace(*args).jaxpr, mesh), mesh)


@pytest.mark.parametrize(
    "name, window",
    [
        *[("ring-4", None), ("ring-4", 5), ("all-gather-8", 17), ("ulysses-4", None), ("usp-2-of-4", 17)],
        *[("swaps-4", None), ("swaps-4", 5)],
    ],
)
def test_bytes_are_those_of_the_docstrings_as_traced_and_as_compiled(name, window):
    split, (q, k, v, _) = Split(*SPLITS[name]), (x.astype(np.float32) for x in arrays(8))
    n, u, groups = split.ranks, split.exchanging, split.groups
    forward = on_ranks(split, window)

    def two_layers(q, k, v):  # in a loop, as layers are: alone XLA:CPU would keep what forward got for backward
        return jnp.sum(jax.lax.scan(lambda q, _: (forward(q, q + k, q + v), None), q, length=2)[0])

    def both(q, k, v):
        return jax.grad(two_layers, argnums=(0, 1, 2))(q, k, v)

    of_q = q.nbytes // n
    keys = 2 * k.nbytes // n
    reached = hops(window, S // groups // 2, groups)
    exchange = (u - 1) / u * (2 * of_q + keys)
    once = exchange + (groups - 1 if reached is None or split.gathers else reached) * keys
    more = (groups - 1) * keys if reached is None and not split.gathers else 0  # a ring's gradients
    assert sent(forward, q, k, v, ranks=n) == once
    assert sent(both, q, k, v, ranks=n) == 2 * (2 * once + more)
    shape = MeshShape(cp=n)
    compiled = emitted_collectives(jax.jit(both).lower(q, k, v).compile().as_text(), shape)
    assert total_sent(compiled, shape) == 2 * (2 * once + more)


@pytest.mark.parametrize("name", ["ring-4", "ulysses-2", "usp-2-of-8"])
def test_keys_of_generated_text_stand_on_the_ranks_by_turns(name):
    split = Split(*SPLITS[name])
    length = 2 * split.ranks * split.unit
    mesh = make_mesh(MeshShape(cp=split.ranks), DEVICES)

    def share(x_BSKH):
        return by_turns(split, split.cut(x_BSKH))

    run = jax.jit(jax.shard_map(share, mesh=mesh, in_specs=P(), out_specs=P(None, "cp")))
    positions = run(jnp.arange(length).reshape(1, length, 1, 1)).reshape(split.ranks, -1)
    np.testing.assert_array_equal(positions, np.arange(length).reshape(-1, split.ranks).T)


# --------------------------------------------------------------------------------------------------------- whole steps

STEP_MASKS = {
    "causal": {},
    "grouped": {"num_kv_heads": 4},
    "window": {"window": 11, "kinds": ("full", "sliding")},
    "packed": {"num_kv_heads": 4},
}
# name -> the mesh beside cp, and the other settings
BESIDE = {
    "dp": ("dp=2,", {}),
    "tp-sp": ("tp=2,", {"sp": True}),
    "zero3": ("dp=2,", {"zero": 3}),
    "pp": ("pp=2,", {"schedule": "zb-h1", "microbatches": 2}),
    "alone": ("", {"zero": 3, "remat": "block"}),
}
STEPS = [
    (kind, mask, cp, beside)
    for kind, mask, cp, beside in itertools.product(
        ("ring", "all-gather", "ulysses", "usp-2"), STEP_MASKS, (2, 4, 8), BESIDE
    )
    if (cp < 8 or beside == "alone") and not (kind == "usp-2" and cp == 2)
]
STEP_SAMPLE = {("ring", "window", 4, "dp")}


@pytest.mark.parametrize("kind, mask, cp, beside", in_sample(STEPS, STEP_SAMPLE))
def test_steps_equal_one_device(kind, mask, cp, beside):
    """Losses, gradients, parameters and moments of two steps of a decoder, in float64 to 1e-10."""
    sizes = {"num_kv_heads": 8} | STEP_MASKS[mask]
    num_layers = 4 if beside == "pp" else 2  # a stage holds whole blocks, and a block with windows has two layers
    model = DecoderConfig(num_layers, 32, 8, head_dim=4, ffn_width=48, seq_len=64, vocab_size=120, **sizes)
    mesh, settings = BESIDE[beside]
    how = {"batch_size": 4, "dtype": "float64", "mask_documents": mask == "packed", "cp_kind": kind}
    report = verify_model(model, f"{mesh}cp={cp}", **how, **settings).require()
    assert max(difference.error for difference in report.differences) < 1e-10


def in_turn(split, hop, carry, steps):
    """The hops of a ring written out."""
    for step in steps:
        carry = hop(carry, step, step % 2)
    return carry


@pytest.mark.parametrize("split", [Split(4), Split(8), Split(8, 2), Split(8, swaps=True)])
def test_a_ring_computes_an_equal_part_of_the_causal_blocks_on_every_rank(monkeypatch, split):
    """One program runs on all ranks, and which blocks it visits is known before it runs."""
    monkeypatch.setattr(context_parallel, "_repeat", in_turn)
    visited, original = [], context_parallel.attend_partly

    def counted(q, k, v, places, window):
        lengths = q.shape[1], k.shape[1]
        visited.extend(blocked.visible_pairs(lengths, (2, 2), places.order, window))
        return original(q, k, v, places, window)

    monkeypatch.setattr(context_parallel, "attend_partly", counted)
    on_ranks(split).trace(*arrays(8)[:3])
    blocks = S // 2
    assert len(visited) * split.groups == blocks * (blocks + 1) // 2


def test_the_report_to_jax_prints_what_it_says(capsys):
    """Why the ring is one function: merged by JAX's own log-sum-exp, forward is right and gradients are not."""
    page = (Path(__file__).parents[2] / "docs/upstream/attention-residual.md").read_text(encoding="utf-8")
    script, printed = (re.search(f"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "text"))
    exec(compile(script, "the report", "exec"), {})
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    said = dict(line.split() for line in printed.splitlines())
    for name in ("dq", "dk"):
        assert float(found[name]) == pytest.approx(float(said[name]), rel=0.1) and float(found[name]) > 0.1
    assert found.keys() == said.keys() and all(float(found[name]) < 1e-6 for name in ("o", "dv"))


@pytest.mark.parametrize(
    "mesh, settings, model, said",
    [
        ("cp=2", {"cp_kind": "rings"}, {}, "ring, all-gather, ulysses, or usp-U"),
        ("cp=2", {"attention": "cudnn"}, {}, "attention=auto"),
        ("cp=4", {"cp_kind": "usp-3"}, {}, "usp-3"),
        ("dp=2", {"cp_kind": "ulysses"}, {}, "cp=1: it would change nothing"),
        ("cp=4", {}, {"seq_len": 36}, "Use a seq_len of 32 or 40"),
        ("cp=8", {"cp_kind": "ulysses"}, {"num_heads": 4}, "4 query heads"),
        ("cp=4,tp=4", {"cp_kind": "ulysses"}, {}, "2 query heads"),
        ("pp=2,cp=3", {}, {"seq_len": 36}, "all-gather"),
        ("pp=2,cp=6", {"cp_kind": "usp-2"}, {"seq_len": 36}, "cp=6"),
        ("cp=2", {}, {"dropout": 0.1}, "ulysses"),
        ("cp=2,tp=4", {"sp": True}, {"seq_len": 12}, "multiple of 8"),
        ("cp=4", {"loss_chunks": 16}, {"seq_len": 32}, "loss_chunks"),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_can(mesh, settings, model, said):
    sizes = {"num_layers": 4, "width": 64, "num_heads": 8, "ffn_width": 128, "seq_len": 32, "vocab_size": 64} | model
    with pytest.raises(ConfigError, match=said):
        RunConfig(GPT2Config(**sizes), ParallelConfig(parse_mesh(mesh), **settings), batch_size=16)
