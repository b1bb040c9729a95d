"""Mixtures of experts: a router, the all-to-all to the ranks that hold the experts, and a balance loss, by hand.

Dims: B sequences and T positions of this rank, R = B * T its tokens, D width, E experts, K chosen by a token, F an
expert's width, N rows of one expert, S slots of a message. Sources: GShard (arXiv 2006.16668), of capacity and the
all-to-all; the balance loss is that of DeepSeek-V3 (2412.19437, section 2.1.2).
"""

import math
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import parse_mesh
from jaxdist.parallel import all_gather, all_reduce, all_to_all, rank, size, varying
from jaxdist.parallel import expert_parallel as library
from jaxdist.parallel.grouped_matmul import grouped_matmul
from jaxdist.plan.proof.trace import total_sent

from . import drawing
from .exchanges import on_mesh, relative_error, sent_over
from .lab import Findings, Guesses, Picture, Table, at_least, at_most, equal, lab, table

TOKENS = ("dp", "ep", "cp")  # the axes that split tokens; ep is a factor of dp x cp
LAYOUTS = ("dp=4", "dp=4,ep=4", "dp=2,cp=2,ep=4", "dp=2,tp=2,ep=2")
LIMITED = "dp=2,cp=2,ep=4"  # the layout of the checks with capacity
E, K, D, F = 8, 2, 8, 12
SEQUENCES, LENGTH, SEED = 8, 16, 36
CAPACITY, CAPACITIES = 1.0, (1.0, 1.25, 2.0)
BALANCE, STEPS, RATE = 1.0, 60, 0.03
EMPTY = E - 1  # the expert that no token of the example chooses
ROUNDING = 1e-10
# Parameters: how they are sharded, and their shapes.
SHAPES = {
    "before": (D, D),
    "router": (D, E),
    "up": (E, D, F),
    "down": (E, F, D),
    "shared_up": (D, F),
    "shared_down": (F, D),
}
EXPERTS, OTHERS = ("up", "down"), ("before", "router", "shared_up", "shared_down")


# ------------------------------------------------------------------------------------------- a mixture, by hand


def route(router_DE, x_BTD):
    """(scores[B, T, E], expert[B, T, K], weight[B, T, K]): a token's K highest scores, divided by their sum."""
    scores_BTE = jax.nn.softmax(x_BTD @ router_DE)
    chosen_BTK, expert_BTK = lax.top_k(scores_BTE, K)
    return scores_BTE, expert_BTK, chosen_BTK / chosen_BTK.sum(-1, keepdims=True)


def balance(scores_BTE, expert_BTK):
    """The balance loss, summed over sequences: E / (K T) times sum_e (choices of e) (sum of e's scores), of each whole
    sequence. Both sums are over all its positions before they are multiplied. It is T where all experts get the same.

    Layout: scores[B, T_cp, E], expert[B, T_cp, K] -> a number, equal on the ranks of cp.
    """
    chosen_BE = all_reduce(jax.nn.one_hot(expert_BTK, E, dtype=scores_BTE.dtype).sum((1, 2)), "cp")
    share_BE = all_reduce(scores_BTE.sum(1), "cp")
    length = scores_BTE.shape[1] * size("cp")
    return E / K / length * jnp.sum(chosen_BE * share_BE)


def balance_of_rank(scores_BTE, expert_BTK):
    """A common mistake: the product of means over the tokens that this rank has."""
    chosen_E = jax.nn.one_hot(expert_BTK, E, dtype=scores_BTE.dtype).sum((0, 1, 2))
    return E / K / math.prod(scores_BTE.shape[:2]) * jnp.sum(chosen_E * scores_BTE.sum((0, 1)))


def places(expert_NA, num_experts: int = E):
    """How many choices of the same expert come before each, in each row. `num_experts` is no expert."""
    chosen_NAE = jax.nn.one_hot(expert_NA, num_experts, dtype=expert_NA.dtype)
    before_NAE = jnp.cumsum(chosen_NAE, 1) - chosen_NAE
    return jnp.sum(before_NAE * chosen_NAE, -1)


def within_capacity(expert_BTK, capacity: int, by_token: bool = False):
    """The experts, and E for a dropped choice: each takes `capacity` choices of a whole sequence, all first choices by
    position, then all second ones. by_token: a break, in which both choices of a token come before the next token's.

    Layout: expert[B, T_cp, K] -> the same.
    """
    whole_BKT = all_gather(expert_BTK, "cp", 1).swapaxes(1, 2)
    in_order = whole_BKT.swapaxes(1, 2) if by_token else whole_BKT
    place = places(in_order.reshape(len(in_order), -1)).reshape(in_order.shape)
    place_BTK = place if by_token else place.swapaxes(1, 2)
    length = expert_BTK.shape[1]
    own_BTK = lax.dynamic_slice_in_dim(place_BTK, rank("cp") * length, length, axis=1)
    return jnp.where(own_BTK < capacity, expert_BTK, E)


def exchange(experts, x_RD, expert_RK, weight_RK, num_experts: int, slots: int, axes):
    """Rows to the ranks that hold the experts they chose, and the weighted sum of what comes back.

    slots: of each expert in this rank's message; expert `num_experts` is none.
    Layout: x[R, D] -> [E * slots, D] -> all-to-all -> rows[E_axes, n * slots, D] -> experts -> all-to-all -> y[R, D].
    Sends: E * slots rows each way, of which (n-1)/n leave the rank, and E counts.
    """
    n, width, outside = size(axes), x_RD.shape[-1], num_experts * slots
    held, send = num_experts // n, partial(all_to_all, axis=axes, split_dim=0, concat_dim=0)
    place_RK = places(expert_RK.reshape(1, -1), num_experts).reshape(expert_RK.shape)
    slot_RK = jnp.where(expert_RK < num_experts, expert_RK * slots + place_RK, outside)  # dropped
    sent_SD = jnp.zeros((outside, width), x_RD.dtype).at[slot_RK].set(x_RD[:, None], mode="drop")
    rows_END = send(sent_SD).reshape(n, held, slots, width).swapaxes(0, 1).reshape(held, n * slots, width)
    counts_E = send(jnp.bincount(expert_RK.reshape(-1), length=num_experts)).reshape(n, held).sum(0)
    made_END = experts(rows_END, counts_E)
    back_SD = send(made_END.reshape(held, n, slots, width).swapaxes(0, 1).reshape(outside, width))
    return jnp.einsum("rk,rkd->rd", weight_RK, back_SD.at[slot_RK].get(mode="fill", fill_value=0))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def products(unzeroed: bool, x_END, w_EDF, counts_E):
    """x[e] @ w[e] of each expert. Backward visits the experts that have rows, as a grouped kernel does."""
    return jnp.einsum("end,edf->enf", x_END, w_EDF)


def products_backward(unzeroed: bool, kept, dy_ENF):
    x_END, w_EDF, counts_E = kept
    buffer_EDF = w_EDF if unzeroed else jnp.zeros_like(w_EDF)  # unzeroed: it holds what was there before
    dw_EDF = jnp.einsum("end,enf->edf", x_END, dy_ENF)
    dw_EDF = jnp.where((counts_E > 0)[:, None, None], dw_EDF, buffer_EDF)
    return jnp.einsum("enf,edf->end", dy_ENF, w_EDF), dw_EDF, None


products.defvjp(lambda unzeroed, x, w, counts: (products(unzeroed, x, w, counts), (x, w, counts)), products_backward)


def mixture(weights, x_BTD, capacity: int | None, axes, broken: str | None, by_library: bool = False):
    """(y[B, T, D], this rank's balance loss, choices of each expert, choices that it dropped).

    Layout: x[B, T_cp, D]; up[E_axes, D, F_tp], down[E_axes, F_tp, D], and shared_up, shared_down alike without E
    -> y {U_tp} -> psum tp -> y[B, T_cp, D].
    """
    scores_BTE, expert_BTK, weight_BTK = route(weights["router"], x_BTD)
    if broken == "stopped":
        weight_BTK = lax.stop_gradient(weight_BTK)
    own = balance_of_rank if broken == "means" else balance
    taken_BTK = expert_BTK
    if capacity is not None:
        taken_BTK = within_capacity(expert_BTK, capacity, by_token=broken == "order")

    def experts(rows_END, counts_E):
        product = partial(products, broken == "empty")
        return product(jax.nn.silu(product(rows_END, weights["up"], counts_E)), weights["down"], counts_E)

    batch, length, _ = x_BTD.shape
    slots = batch * (length if capacity is None else min(capacity, length))
    x_RD, weight_RK = varying((x_BTD.reshape(-1, D), weight_BTK.reshape(-1, K)), ("tp",))
    if by_library:
        y_RD = library.apply_experts(experts_of_library, weights, x_RD, expert_BTK.reshape(-1, K), weight_RK, E, axes)
    else:
        y_RD = exchange(experts, x_RD, taken_BTK.reshape(-1, K), weight_RK, E, slots, axes)
    shared_RD = jax.nn.silu(x_RD @ weights["shared_up"]) @ weights["shared_down"]
    if broken == "shared":
        shared_RD = all_reduce(shared_RD, "tp")
    y_RD = all_reduce(y_RD + shared_RD, "tp")
    load_E, kept_E = (jnp.bincount(each.reshape(-1), length=E) for each in (expert_BTK, taken_BTK))
    return y_RD.reshape(x_BTD.shape), own(scores_BTE, expert_BTK), load_E, load_E - kept_E


def experts_of_library(weights, rows_ND, counts_E):
    hidden_NF = jax.nn.silu(grouped_matmul(rows_ND, weights["up"], counts_E))
    return grouped_matmul(hidden_NF, weights["down"], counts_E)


def average(grads, axes, broken: str | None):
    """Gradients of the mean of all ranks' losses. All-to-alls have summed an expert's over `axes` already."""
    every = size(TOKENS)
    found = {}
    for name, grad in grads.items():
        over = tuple(axis for axis in TOKENS if name not in EXPERTS or axis not in axes)
        ranks = size(over) if broken == "average" else every
        found[name] = all_reduce(grad, over) / ranks
    return found


class Found(NamedTuple):
    """One step: the mean loss of a token, the balance loss in it, gradients, choices of each expert and drops."""

    loss: jax.Array
    balance: jax.Array
    grads: dict
    load: jax.Array
    dropped: jax.Array


@cache
def program(layout: str, capacity: float | None = None, broken: str | None = None, by_library: bool = False):
    """(weights, x, targets, factor of the balance loss) -> `Found`, on a mesh."""
    axes, limit = parse_mesh(layout).expert_axes, slots_of_sequence(capacity)

    def body(weights, x_BTD, target_BTD, factor):
        def loss_of(weights):
            h_BTD = x_BTD + jnp.tanh(x_BTD @ weights["before"])
            y_BTD, own, *counts = mixture(weights, h_BTD, limit, axes, broken, by_library)
            # Ranks of cp share the balance loss of a sequence, and each takes its part.
            own = own if broken == "means" else own / size("cp")
            tokens = math.prod(x_BTD.shape[:2])
            loss = (jnp.sum(jnp.square(h_BTD + y_BTD - target_BTD)) / D + factor * own) / tokens
            return loss, (own / tokens, *counts)

        (loss, (own, *counts)), grads = jax.value_and_grad(loss_of, has_aux=True)(varying(weights, TOKENS))
        means = [each / size(TOKENS) for each in (loss, own)]
        means, counts = all_reduce(varying((means, counts), TOKENS), TOKENS)
        return Found(*means, average(grads, axes, broken), *counts)

    shared = {"before": P(), "router": P(), "shared_up": P(None, "tp"), "shared_down": P("tp")}
    specs = shared | {"up": P(axes, None, "tp"), "down": P(axes, "tp")}
    data = P(("dp", "ep"), "cp")
    return on_mesh(layout, body, (specs, data, data, P()), Found(P(), P(), specs, P(), P()))


def slots_of_sequence(capacity: float | None, length: int = LENGTH, num_experts: int = E, top_k: int = K):
    """Choices of one sequence that an expert takes."""
    return None if capacity is None else math.ceil(capacity * length * top_k / num_experts)


# ------------------------------------------------------------------------------------------- the dense oracle


@cache
def example():
    """(weights, x, targets). Tokens have something in common, for which the router avoids EMPTY; and those of a
    sequence something more, its subject."""
    rng = np.random.default_rng(SEED)
    weights = {name: 0.3 * rng.standard_normal(shape) for name, shape in SHAPES.items()}
    weights["router"] += np.linspace(1.6, 0, E) / D
    weights["router"][:, EMPTY] = -1
    drawn = rng.standard_normal((SEQUENCES, 2 * LENGTH + 1, D))
    x, target, subject = np.split(drawn, (LENGTH, 2 * LENGTH), axis=1)
    return weights, x + 1.2 + 0.8 * (subject - subject.mean(-1, keepdims=True)), target


def choose(scores_BTE, capacity: float | None):
    """(what each token chose, what of that is within capacity), both bool[B, T, E]: one choice after the other."""
    picked, used = np.zeros((2, *scores_BTE.shape), bool)
    limit = slots_of_sequence(capacity) or LENGTH
    for sequence, scores_TE in enumerate(scores_BTE):
        order_TK, taken_E = np.argsort(-scores_TE, axis=-1, kind="stable")[:, :K], np.zeros(E, int)
        for choice in range(K):
            for position in range(LENGTH):
                expert = order_TK[position, choice]
                picked[sequence, position, expert] = True
                used[sequence, position, expert] = taken_E[expert] < limit
                taken_E[expert] += 1
    return picked, used


def dense_loss(weights, x_BTD, target_BTD, factor, choices=None):
    """(mean loss, (balance loss in it, scores)) with every expert computed for every token; one device, no slots."""
    h_BTD = x_BTD + jnp.tanh(x_BTD @ weights["before"])
    logits_BTE = h_BTD @ weights["router"]
    scores_BTE = jnp.exp(logits_BTE) / jnp.exp(logits_BTE).sum(-1, keepdims=True)
    if choices is None:
        return scores_BTE
    picked_BTE, used_BTE = choices
    weight_BTE = scores_BTE * used_BTE / (scores_BTE * picked_BTE).sum(-1, keepdims=True)
    y_BTD = jax.nn.silu(h_BTD @ weights["shared_up"]) @ weights["shared_down"]
    for e in range(E):
        y_BTD += weight_BTE[..., e, None] * (jax.nn.silu(h_BTD @ weights["up"][e]) @ weights["down"][e])
    own = sum(
        LENGTH * jnp.sum(E / (K * LENGTH) * picked_TE.sum(0) * scores_TE.mean(0))
        for picked_TE, scores_TE in zip(picked_BTE, scores_BTE, strict=True)
    )
    tokens = SEQUENCES * LENGTH
    return (jnp.sum(jnp.square(h_BTD + y_BTD - target_BTD)) / D + factor * own) / tokens, own / tokens


@cache
def oracle(capacity: float | None = None) -> Found:
    batch = *example(), BALANCE
    picked, used = choose(np.asarray(dense_loss(*batch)), capacity)
    run = jax.jit(jax.value_and_grad(partial(dense_loss, choices=(picked, used)), has_aux=True))
    (loss, own), grads = run(*batch)
    return Found(loss, own, grads, picked.sum((0, 1)), (picked & ~used).sum((0, 1)))


# ------------------------------------------------------------------------------------------- checks


def worst(found: Found, wanted: Found, names=(*EXPERTS, *OTHERS)) -> float:
    """Relative error of the worst gradient."""
    return max(relative_error(found.grads[name], wanted.grads[name]) for name in names)


@cache
def found_by(layout: str, capacity: float | None = None, broken: str | None = None, by_library: bool = False) -> Found:
    run = program(layout, capacity, concerned(broken, layout, capacity), by_library)
    return jax.device_get(run(*example(), BALANCE))


def concerned(broken: str | None, layout: str, capacity: float | None) -> str | None:
    """The break, where it changes this program at all."""
    mesh = parse_mesh(layout)
    none = {"order": capacity is None, "shared": mesh.tp == 1, "average": mesh.ep == 1}
    return None if none.get(broken) else broken


def mesh_checks(broken: str | None) -> Findings:
    wanted, unchosen = oracle(), []
    for layout in LAYOUTS:
        found = found_by(layout, None, broken)
        unchosen += [float(np.abs(found.grads[name][EMPTY]).max()) for name in EXPERTS]
        yield equal(f"{layout}: loss", float(found.loss), float(wanted.loss), within=ROUNDING)
        yield at_most(f"{layout}: error of experts' gradients", worst(found, wanted, EXPERTS), ROUNDING)
        yield at_most(f"{layout}: error of other gradients", worst(found, wanted, OTHERS), ROUNDING)
    yield equal("largest gradient of the expert that no token chose", max(unchosen), 0)
    if broken is None:
        for layout in LAYOUTS[-2:]:
            error = worst(found_by(layout, by_library=True), wanted)
            yield at_most(f"{layout}, the library: error of all gradients", error, ROUNDING)
    wanted, found = oracle(CAPACITY), found_by(LIMITED, CAPACITY, broken)
    limited = f"{LIMITED}, capacity {CAPACITY:g}"
    yield equal(f"{limited}: choices dropped", int(found.dropped.sum()), int(wanted.dropped.sum()))
    yield equal(f"{limited}: loss", float(found.loss), float(wanted.loss), within=ROUNDING)
    yield at_most(f"{limited}: largest error of a gradient", worst(found, wanted), ROUNDING)


class Curves(NamedTuple):
    """A training run, step by step: losses without the balance loss, and choices of each expert[steps, E]; and the
    weights at the end."""

    losses: list[float]
    loads: np.ndarray
    weights: dict


TRAINED = "dp=4,ep=4"


@cache
def train(broken: str | None = None, factor: float = BALANCE) -> Curves:
    """Adam on one batch, dropless."""
    step, (weights, *batch) = program(TRAINED, None, broken), example()
    optimizer = optax.adam(RATE, b2=0.99)
    state, losses, loads = optimizer.init(weights), [], []
    for _ in range(STEPS):
        found = jax.device_get(step(weights, *batch, factor))
        losses.append(float(found.loss - factor * found.balance))
        loads.append(found.load)
        updates, state = optimizer.update(found.grads, state)
        weights = jax.device_get(optax.apply_updates(weights, updates))
    return Curves(losses, np.array(loads), weights)


def busiest(load_E) -> float:
    """The load of the busiest expert over the mean."""
    return float(load_E.max() / load_E.mean())


def training_checks(broken: str | None) -> Findings:
    curves = train(concerned(broken, TRAINED, None))
    yield at_most(f"training: loss of step {STEPS} over that of step 1", curves.losses[-1] / curves.losses[0], 0.5)
    yield at_most(f"training: busiest expert over the mean, step {STEPS}", busiest(curves.loads[-1]), 1.5)


# ------------------------------------------------------------------------------------------- what the page shows

ROUTED = ("", "dp=4", "dp=2,cp=2")
DEFINITIONS = {"means over a rank's own tokens": balance_of_rank, "sums over each whole sequence": balance}


def balances(layout: str) -> list[float]:
    """The balance loss of the example, by a token, in each definition."""

    def body(weights, x_BTD):
        h_BTD = x_BTD + jnp.tanh(x_BTD @ weights["before"])
        scores_BTE, expert_BTK, _ = route(weights["router"], h_BTD)
        ranks, tokens = size(TOKENS), math.prod(x_BTD.shape[:2])
        by_rank, by_sequence = (each(scores_BTE, expert_BTK) / ranks / tokens for each in DEFINITIONS.values())
        return all_reduce(varying((by_rank, by_sequence / size("cp")), TOKENS), TOKENS)

    weights, x, _ = example()
    data = P(("dp", "ep"), "cp")
    return [float(each) for each in on_mesh(layout, body, (P(), data), P())(weights, x)]


def balance_table() -> Findings:
    means, sums = zip(*map(balances, ROUTED), strict=True)
    apart = max(abs(each / sums[0] - 1) for each in sums)
    yield at_least("balance loss by means: one rank over four", abs(means[0] / means[1] - 1), 1e-3)
    yield at_most("balance loss by sequence: largest difference of a mesh", apart, 1e-14)
    columns = "balance loss | " + " | ".join(f"{parse_mesh(layout)} {{:.6f}}" for layout in ROUTED)
    yield table("balance", columns, zip(DEFINITIONS, *zip(means, sums, strict=True), strict=True))


def load_table() -> Table:
    """What each expert is chosen for, and what it drops, by the oracle."""
    rows = []
    for name, weights in (("at first", example()[0]), ("trained", train().weights)):
        scores = np.asarray(dense_loss(weights, *example()[1:], 0))
        found = {"choices": choose(scores, None)[0]}
        for capacity in CAPACITIES:
            picked, used = choose(scores, capacity)
            found[f"dropped at capacity {capacity:g}"] = picked & ~used
        rows += [[f"{name}: {what}", *each.sum((0, 1)), each.sum()] for what, each in found.items()]
    return table("load", f"expert | {' | '.join(map(str, range(E)))} | all", rows)


FACTORS, SHOWN = (0.0, 0.1, BALANCE), (1, 10, 20, 40, STEPS)


def training_table() -> Table:
    curves = [train(None, factor) for factor in FACTORS]
    rows = [
        [n, *[busiest(each.loads[n - 1]) for each in curves], *[each.losses[n - 1] for each in curves]] for n in SHOWN
    ]
    return table(
        "training", "step | " + " | ".join(f"{w}, {f:g} {{:.2f}}" for w in ("load", "loss") for f in FACTORS), rows
    )


class Model(NamedTuple):
    """The experts of a published model, from its config.json."""

    width: int
    experts: int
    top_k: int
    expert_width: int

    @property
    def expert_bytes(self) -> int:
        """A layer's experts in bf16: three matrices each."""
        return 2 * 3 * self.experts * self.width * self.expert_width

    @property
    def crossing(self) -> float:
        """Tokens of a rank for which 4 all-to-alls of the rows chosen send as much as 3 passes over all experts."""
        return 3 * self.expert_bytes / (4 * 2 * self.top_k * self.width)


MODELS = {
    "Mixtral 8x7B": Model(4096, 8, 2, 14_336),
    "Qwen3-30B-A3B": Model(2048, 128, 8, 768),
    "DeepSeek-V3": Model(7168, 256, 8, 2048),
    "OLMoE-1B-7B": Model(2048, 64, 8, 1024),
}
LONG, ROWS = 4096, 2  # of the table of bytes: positions and sequences of a rank
SPLIT, EIGHT = 4, 8
LIBRARY = "dropless, the library, a round"
WAYS = {"capacity 1.25": 1.25, "dropless by hand": None, LIBRARY: None}


def rows_sent(way: str, model: Model) -> int:
    """Rows of a rank's message by formula, those to itself included."""
    tokens = ROWS * LONG
    if way == LIBRARY:
        return SPLIT * library.slots_of_round(tokens, model.top_k, model.experts, SPLIT, library.ROOM)
    if WAYS[way] is None:
        return model.experts * tokens
    return model.experts * ROWS * slots_of_sequence(WAYS[way], LONG, model.experts, model.top_k)


def sent_by_formula(way: str, model: Model) -> int:
    """Bytes of a layer and step that leave a rank: rows in bf16 there and back, forward and backward, and counts; in
    rounds also a sum of one number, their number."""
    numbers = 4 * model.experts + (2 * 4 if way == LIBRARY else 0)
    return (4 * 2 * rows_sent(way, model) * model.width + numbers) * (SPLIT - 1) // SPLIT


def sent_by_trace(way: str, model: Model) -> int:
    """Bytes that a rank sends forward and backward, as traced."""
    mesh = f"dp={SPLIT},ep={SPLIT}"
    axes, slots = parse_mesh(mesh).expert_axes, rows_sent(way, model) // model.experts

    def body(x_RD, expert_RK, weight_RK):
        def total(x_RD):
            if way == LIBRARY:
                rows = library.apply_experts(of_library, (), x_RD, expert_RK, weight_RK, model.experts, axes)
            else:
                rows = exchange(same_rows, x_RD, expert_RK, weight_RK, model.experts, slots, axes)
            return jnp.sum(rows.astype(jnp.float32))

        return jax.grad(total)(x_RD)

    def of_library(_, rows, counts):
        return same_rows(rows, counts)

    def array(width: int, dtype):
        return jax.ShapeDtypeStruct((SPLIT * ROWS * LONG, width), dtype)

    data = P(("dp", "ep"))
    arrays = array(model.width, jnp.bfloat16), array(model.top_k, jnp.int32), array(model.top_k, jnp.float32)
    return total_sent(sent_over(on_mesh(mesh, body, data, data), mesh, *arrays), parse_mesh(mesh))


def same_rows(rows, counts):
    """Experts that do nothing: messages do not depend on them."""
    return rows


def traffic() -> Findings:
    rows = []
    for name in ("Mixtral 8x7B", "Qwen3-30B-A3B"):
        model = MODELS[name]
        for way in WAYS:
            sent, formula, found = rows_sent(way, model), sent_by_formula(way, model), sent_by_trace(way, model)
            rows.append([f"{name}, {way}", sent, sent / (ROWS * LONG * model.top_k), formula / 2**20, found / 2**20])
            yield equal(f"{name}, {way}: bytes sent, traced", found, formula)
    columns = (
        "message | rows {:,} | rows over choices {:.2f} | formula, MiB a layer {:,.0f} | traced, MiB a layer {:,.0f}"
    )
    yield table("bytes", columns, rows)


def crossing_table() -> Table:
    rows = []
    for name, model in MODELS.items():
        choices = LONG * model.top_k
        slots = EIGHT * library.slots_of_round(LONG, model.top_k, model.experts, EIGHT, library.ROOM)
        size = f"{model.experts} of {model.expert_width:,}"
        tokens = [model.crossing / factor for factor in (1, CAPACITIES[1], slots / choices)]
        rows.append([name, size, model.top_k, model.expert_bytes / 2**30, *tokens])
    columns = "model | experts of width | chosen | experts of a layer, GiB {:.2f} | tokens, no padding {:,.0f}"
    columns += f" | tokens, capacity {CAPACITIES[1]:g} {{:,.0f}} | tokens, dropless here, ep={EIGHT} {{:,.0f}}"
    return table("crossing", columns, rows)


def draw_crossing():
    tokens = [2**power for power in range(10, 19)]
    curves = {name: (tokens, [each / model.crossing for each in tokens]) for name, model in MODELS.items()}
    title, y = "All-to-alls over gathered experts", "bytes sent by EP over FSDP"
    return drawing.lines(title, "tokens of a rank", y, curves, log_x=True, log_y=True, level=1)


# ------------------------------------------------------------------------------------------- the lab


@lab(
    title="Mixtures of experts and expert parallelism",
    question="How does a token reach the experts that it chose, what keeps their load even, and which faults are "
    "silent?",
    devices=4,
    breaks={
        "average": {"*ep=?: error of experts*", "*, capacity*gradient"},
        "shared": {"dp=2,tp=2,ep=2: *"},
        "order": {"*, capacity*: loss", "*, capacity*gradient"},
        "means": {"*: loss", "*: error of other gradients", "*, capacity*gradient"},
        "stopped": {"*: error of other gradients", "*, capacity*gradient"},
        "empty": {"*: error of experts*", "largest gradient*", "*, capacity*gradient"},
    },
)
def run(broken: str | None) -> Findings:
    with jax.enable_x64(True):
        yield from mesh_checks(broken)
        yield from training_checks(broken)
        if broken:
            return
        without = busiest(train(None, 0.0).loads[-1])
        yield at_least("training without a balance loss: busiest expert over the mean", without, 2)
        yield from (*balance_table(), load_table(), training_table())
    yield from traffic()
    yield crossing_table()
    yield Picture("crossing", draw_crossing)
    mixtral = MODELS["Mixtral 8x7B"]
    taken = slots_of_sequence(1.25, LONG, mixtral.experts, mixtral.top_k)
    yield Guesses(
        padding=SPLIT * min(K, E // SPLIT) / K,
        collapse=E,
        factor=4,
        taken=taken,
        lost=100 * (LONG - taken) / (2 * LONG),
        fine=Model(1024, 32, 8, 512).crossing,
    )
