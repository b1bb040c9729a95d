"""A solution of every task of `python -m experiments.labs grade`; its signatures and docstrings are the templates.

Where there is an `axis`, a function runs on each of n ranks inside `jax.shard_map`. Its arrays are the rank's own and
typed varying: nothing is summed but by what you write. [D_n] is a dim of which each rank has its part, [D] is whole. dy
is the gradient of the loss with respect to y, and dx of the same loss with respect to x.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax


def mean_gradient(loss, params, batch, axis):
    """Mean loss over all targets of all ranks, and its gradient.

    loss(params, batch) -> (sum of the losses of this rank's targets, their number); ranks have different numbers.
    Layout: params {name: [...]} equal on all ranks -> (mean, gradients {name: [...]}) equal on all ranks.
    Least sent: an all-reduce of the gradients, the sum and the count.
    """
    (total, count), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    total, count, grads = lax.psum((total, count, grads), axis)
    return total / count, jax.tree.map(lambda g: g / count, grads)


def all_reduce(x, axis):
    """Sum over the ranks, from `jax.lax.ppermute` alone.

    Layout: x[S] of each rank -> its sum over the ranks [S], on each rank; n divides S.
    Least sent: 2 (n-1)/n of x.
    """
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    chunks, to_the_right = x.reshape(n, -1), [(rank, (rank + 1) % n) for rank in range(n)]
    for step in range(2 * (n - 1)):
        arrived = lax.ppermute(chunks[(me - 1 - step) % n], axis, to_the_right)
        place = chunks.at[(me - 2 - step) % n]
        chunks = place.add(arrived) if step < n - 1 else place.set(arrived)
    return chunks.reshape(x.shape)


def reduce_scatter(x, dy, axis):
    """Part r of the sum over the ranks on rank r, and the transpose of that, from `jax.lax.ppermute` alone.

    Layout: x[S] of each rank -> y[S_n]; dy[S_n] -> dx[S], the gradient of the sum over ranks of <y, dy>.
    Least sent: 2 (n-1)/n of x, half of it for each.
    """
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    chunks, to_the_right = x.reshape(n, -1), [(rank, (rank + 1) % n) for rank in range(n)]
    y, part, dx = chunks[me - 1], dy, jnp.zeros_like(chunks).at[me].set(dy)
    for step in range(1, n):
        y = lax.ppermute(y, axis, to_the_right) + chunks[(me - 1 - step) % n]
        part = lax.ppermute(part, axis, to_the_right)
        dx = dx.at[(me - step) % n].set(part)
    return y, dx.reshape(x.shape)


def bucketed_sum(most, grads, axis):
    """Gradients summed over the ranks, in buckets of at most `most` elements.

    Take the list in its order; a bucket is full when the next array would not fit. A larger array is a bucket alone.
    Layout: grads [array, ...] of each rank -> their sums [array, ...], on each rank.
    Least sent: an all-reduce of everything, in one message a bucket.
    """
    buckets = [[]]
    for grad in grads:
        if buckets[-1] and sum(each.size for each in buckets[-1]) + grad.size > most:
            buckets.append([])
        buckets[-1].append(grad)
    summed = []
    for bucket in buckets:
        flat = lax.psum(jnp.concatenate([grad.ravel() for grad in bucket]), axis)
        for grad in bucket:
            summed.append(flat[: grad.size].reshape(grad.shape))
            flat = flat[grad.size :]
    return summed


def zero1_step(loss, params, momentum, batch, axis):
    """One step of SGD with momentum that is sharded (ZeRO-1): m = 0.9 m + gradient; p = p - 0.1 m.

    loss(params, batch): this rank's part of the loss; the loss is the sum over the ranks.
    Layout: params {name: [D, F]} equal on all ranks, momentum {name: [D_n, F]} -> both, after the step.
    Least sent: 2 (n-1)/n of the parameters.
    """
    me, grads = lax.axis_index(axis), jax.grad(loss)(params, batch)
    new_params, new_momentum = {}, {}
    for name, whole in params.items():
        m = 0.9 * momentum[name] + lax.psum_scatter(grads[name], axis, tiled=True)
        mine = lax.dynamic_slice_in_dim(whole, me * len(m), len(m)) - 0.1 * m
        new_params[name], new_momentum[name] = lax.all_gather(mine, axis, tiled=True), m
    return new_params, new_momentum


def zero3_step(layer, loss, shards, batch, axis):
    """One step of SGD of layers whose weights are sharded (ZeRO-3): w = w - 0.1 gradient.

    batch: (x, target) of this rank; x goes through layer(w, x) for each w[D, D] in turn, then loss(x, target) is this
    rank's part of the loss, which is the sum over the ranks.
    Layout: shards [w[D_n, D], ...] -> the same, after the step.
    Least sent, where few whole weights are held at a time: 3 (n-1)/n of the weights.
    """

    @jax.checkpoint
    def gathered_layer(shard, x):
        return layer(lax.all_gather(shard, axis, tiled=True), x)

    def forward(shards):
        x, target = batch
        for shard in shards:
            x = gathered_layer(shard, x)
        return loss(x, target)

    return [shard - 0.1 * grad for shard, grad in zip(shards, jax.grad(forward)(shards), strict=True)]


def column_row_mlp(x, up, down, dy, axis):
    """y = gelu(x @ up) @ down with `up` split by columns and `down` by rows, and all gradients for dy.

    Layout: x[B, D], up[D, F_n], down[F_n, D], dy[B, D] -> y[B, D], dx[B, D] equal on all ranks, dup, ddown as up, down.
    Least sent: two all-reduces of [B, D].
    """
    partial, pull_back = jax.vjp(lambda x, up, down: jax.nn.gelu(x @ up) @ down, x, up, down)
    dx, dup, ddown = pull_back(dy)
    return lax.psum(partial, axis), lax.psum(dx, axis), dup, ddown


def vocabulary_loss(h, table, targets, axis):
    """Sum of the cross-entropies of softmax(h @ table.T), the table split by tokens, and the gradients.

    Logits may be of any size, so subtract the largest before exp.
    Layout: h[B, D], table[V_n, D], targets[B] of the whole vocabulary -> loss, dh[B, D] equal on all ranks, dtable.
    Least sent: all-reduces of three numbers a target, and one of [B, D].
    """
    logits = h @ table.T
    mine = targets[:, None] == lax.axis_index(axis) * len(table) + jnp.arange(len(table))
    largest = lax.pmax(logits.max(-1), axis)
    exps = jnp.exp(logits - largest[:, None])
    total, picked = lax.psum((exps.sum(-1), (logits * mine).sum(-1)), axis)
    dlogits = exps / total[:, None] - mine
    return (jnp.log(total) + largest - picked).sum(), lax.psum(dlogits @ table, axis), dlogits.T @ h


def sequence_parallel_mlp(x, scale, up, down, dy, axis):
    """y = gelu(rms_norm(x) * scale @ up) @ down, tokens split outside of the two matrices, and all gradients for dy.

    rms_norm(x) = x / sqrt(mean of x² over D + 1e-6).
    Layout: x[T_n, D], scale[D], up[D, F_n], down[F_n, D], dy[T_n, D] -> y, dx[T_n, D], dscale, dup, ddown as scale, up,
    down.
    Least sent: two all-gathers and two reduce-scatters of [T, D], and an all-reduce of [D].
    """

    def mlp(x, scale, up, down):
        normed = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
        hidden = jax.nn.gelu(lax.all_gather(normed, axis, tiled=True) @ up)
        return lax.psum_scatter(hidden @ down, axis, tiled=True)

    y, pull_back = jax.vjp(mlp, x, scale, up, down)
    dx, dscale, dup, ddown = pull_back(dy)
    return y, dx, lax.psum(dscale, axis), dup, ddown


def one_f_one_b(stages, microbatches):
    """The order in which each stage runs its actions: 1F1B.

    F3, B3, W3: forward, input gradient and weight gradient of micro-batch 3, a tick each; a stage runs its next action
    as soon as what it needs is there.
    Returns: for each stage a text such as "F0 F1 B0 W0 B1 W1".
    At most: a bubble of 2(p-1)/(3m) of the work, and p - s micro-batches in flight (F begun, W not done) on stage s.
    """
    lines = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        order = [f"F{m}" for m in range(ahead)]
        for m in range(microbatches):
            order += [f"B{m}", f"W{m}"] + [f"F{m + ahead}"] * (m + ahead < microbatches)
        lines.append(" ".join(order))
    return lines


def less_bubble(stages, microbatches):
    """As `one_f_one_b`, with half of its bubble and no more memory.

    At most: a bubble of (p-1)/(3m) of the work, and p micro-batches in flight on any stage.
    """
    lines = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        order = [f"F{m}" for m in range(ahead)]
        for m in range(microbatches):
            order += [f"B{m}"] + [f"W{m - stage}"] * (m >= stage) + [f"F{m + ahead}"] * (m + ahead < microbatches)
        order += [f"W{m}" for m in range(max(microbatches - stage, 0), microbatches)]
        lines.append(" ".join(order))
    return lines


def ring_attention(q, k, v, do, axis):
    """Causal attention of one head to a sequence that the ranks share, and its backward, a block of keys at a time.

    Layout: q, k, v, do[T_n, H] -> o, dq, dk, dv[T_n, H]; rank r has the positions from r * T/n.
    At most sent: k and v n-1 times in each direction, their gradients n times. Never holds scores of all keys.
    """
    n, me, (length, head_dim) = lax.axis_size(axis), lax.axis_index(axis), q.shape
    place = jnp.arange(length)

    def onwards(arrays):
        return lax.ppermute(arrays, axis, [(rank, (rank + 1) % n) for rank in range(n)])

    def scores_of(k, step):
        seen = me * length + place[:, None] >= (me - step) % n * length + place
        return jnp.where(seen, q @ k.T / math.sqrt(head_dim), -jnp.inf)

    held, scores = (k, v), scores_of(k, 0)
    lse = jax.nn.logsumexp(scores, -1, keepdims=True)
    o = jnp.exp(scores - lse) @ v
    for step in range(1, n):
        held = onwards(held)
        scores = scores_of(held[0], step)
        both = jnp.logaddexp(lse, jax.nn.logsumexp(scores, -1, keepdims=True))
        o, lse = o * jnp.exp(lse - both) + jnp.exp(scores - both) @ held[1], both

    dq, dk, dv = map(jnp.zeros_like, (q, k, v))
    owed = (do * o).sum(-1, keepdims=True)
    for step in range(n):
        shares = jnp.exp(scores_of(k, step) - lse)
        dscores = shares * (do @ v.T - owed) / math.sqrt(head_dim)
        dq, dk, dv = dq + dscores @ k, dk + dscores.T @ q, dv + shares.T @ do
        k, v = onwards((k, v)) if step < n - 1 else (k, v)
        dk, dv = onwards((dk, dv))
    return o, dq, dk, dv


def scaled_step(loss, weights, batch, scale, good, axis):
    """One step of SGD in float16 with a loss scale: w = w - 0.1 gradient, of weights kept in a wider dtype.

    loss(half, batch): this rank's part in float16 for weights in float16; the loss is the sum over the ranks.
    An update is skipped on all ranks if a gradient of any is not finite: the scale is halved and good is 0. Otherwise
    good counts up, and at 2 the scale is doubled and good is 0 again.
    Layout: weights[D], scale, good equal on all ranks -> the same, after the step.
    """
    half, factor = weights.astype(jnp.float16), scale.astype(jnp.float16)
    grads = jax.grad(lambda half: loss(half, batch) * factor)(half)
    grads = lax.psum(grads.astype(weights.dtype), axis) / scale
    finite = jnp.isfinite(grads).all()
    good = jnp.where(finite, good + 1, 0)
    scale = jnp.where(finite, jnp.where(good == 2, 2 * scale, scale), scale / 2)
    return jnp.where(finite, weights - 0.1 * grads, weights), scale, good % 2


def state_bytes(parameters, zero, dp, tp, pp):
    """Bytes of the model's state on one device: Adam in mixed precision.

    2 bytes a parameter of weights, 2 of gradients, 12 of masters and moments; zero: ZeRO's stage, 0 to 3.
    """
    weights, grads, optimizer = (dp if zero >= stage else 1 for stage in (3, 2, 1))
    return parameters / tp / pp * (2 / weights + 2 / grads + 12 / optimizer)


def activation_bytes(seq_len, rows, width, num_heads, tp, sp):
    """Bytes that one GPT layer keeps for backward on one device, in 16 bits with dropout and whole scores.

    sp: whether tp's ranks split the tokens where the layer is not split (arXiv 2205.05198, table 2).
    """
    scores = 5 * num_heads * seq_len / width
    return seq_len * rows * width * (10 / (tp if sp else 1) + (24 + scores) / tp)


def top2_experts(x, router, up, down, dy, axis):
    """Each token to the 2 experts of E with the largest x @ router, none dropped, and all gradients for dy.

    Expert e computes tanh(x @ up[e]) @ down[e]; the two results are weighted by the softmax of their two scores.
    Layout: x[T_n, D], router[D, E], up[E_n, D, F], down[E_n, F, D], dy[T_n, D] -> y, dx, drouter, dup, ddown as x, x,
    router, up, down.
    At most sent: as if every rank had every token once: twice an all-gather and a reduce-scatter of [T, D], an
    all-reduce of drouter, and all-gathers of [T, E] for gates.
    """

    def experts(x, router, up, down):
        every_x = lax.all_gather(x, axis, tiled=True)
        scores, chosen = lax.top_k(every_x @ router, 2)
        first = lax.axis_index(axis) * len(up)
        is_chosen = chosen[:, :, None] == first + jnp.arange(len(up))
        gates = (jax.nn.softmax(scores)[:, :, None] * is_chosen).sum(1)
        results = jnp.einsum("ebf,efd->ebd", jnp.tanh(jnp.einsum("bd,edf->ebf", every_x, up)), down)
        return lax.psum_scatter(jnp.einsum("be,ebd->bd", gates, results), axis, tiled=True)

    y, pull_back = jax.vjp(experts, x, router, up, down)
    dx, drouter, dup, ddown = pull_back(dy)
    return y, dx, lax.psum(drouter, axis), dup, ddown


def newton_schulz(x, axis):
    """Muon's orthogonalization of a matrix that is split by columns.

    Divide by the Frobenius norm, then five times x = 3.4445 x - 4.775 A x + 2.0315 A A x with A = x @ x.T.
    Layout: x[M, N_n] -> the same; M is much smaller than N.
    Least sent: five all-reduces of [M, M], and one of a number.
    """
    x = x / jnp.sqrt(lax.psum((x * x).sum(), axis))
    for _ in range(5):
        a = lax.psum(x @ x.T, axis)
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x
