"""The cross-entropy of a tied head a chunk of rows at a time, so that few logits exist at once.

Dims and `vocab_parallel_cross_entropy`: as in `jaxdist.parallel.vocabulary`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
from jaxdist.parallel import tensor
from jaxdist.parallel.vocabulary import softmax_losses


def cross_entropy_in_chunks(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    vocab_size: int,
    sp: bool,
    num_chunks: int,
    one_pass: bool = False,
) -> jax.Array:
    """The sum of `vocab_parallel_cross_entropy` over targets that are not negative, a chunk of rows at a time.

    A chunk's gradients are made while its logits are there, and nothing is computed twice: differentiated, it holds the
    logits of B*T / num_chunks rows, and the gradients of x and of the table in at least fp32. The number of chunks
    divides B*T.

    Layout: as `vocab_parallel_cross_entropy`, but -> loss [], equal along tp.
    Sends: the same bytes in num_chunks times as many all-reduces; `enter`'s share once.
    Source: Liger Kernel, arXiv 2410.10989, section 3.2 (fused linear cross-entropy).
    """
    x_BTD = tensor.enter(x_BTD, sp)
    width, dtype = x_BTD.shape[-1], x_BTD.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    x_CRD = x_BTD.reshape(num_chunks, -1, width)
    targets_CR = targets_BT.reshape(num_chunks, -1)
    table_VD = comm.varying_like(comm.varying(table_VD, tensor.AXIS), x_CRD)
    # Half precision would lose the small ones of a gradient that is scaled only later.
    seed = 2.0**12 / x_CRD.shape[1] if dtype == jnp.float16 else 1.0

    def chunk_loss(x_RD, table_VD, targets_R):
        losses_R = softmax_losses(vocab_size, one_pass, x_RD @ table_VD.T, targets_R)
        return jnp.where(targets_R >= 0, losses_R, 0).sum()

    def total(x_CRD, table_VD, targets_CR):
        def body(loss, chunk):
            return loss + chunk_loss(chunk[0], table_VD, chunk[1]), None

        return lax.scan(body, zero(x_CRD, table_VD, targets_CR), (x_CRD, targets_CR))[0]

    def zero(x_CRD, table_VD, targets_CR):
        like = jax.eval_shape(chunk_loss, x_CRD[0], table_VD, targets_CR[0])
        return comm.varying_like(jnp.zeros((), like.dtype), like)

    def forward(x_CRD, table_VD, targets_CR):
        # Of a frozen table there is none.
        trained = table_VD.perturbed
        x_CRD, table_VD, targets_CR = (each.value for each in (x_CRD, table_VD, targets_CR))

        def body(carry, chunk):
            loss, d_table = carry
            x_RD, targets_R = chunk
            here, pull = jax.vjp(
                lambda x, table: chunk_loss(x, table_VD if table is None else table, targets_R),
                x_RD,
                table_VD if trained else None,
            )
            d_x, more = pull(comm.varying_like(jnp.asarray(seed, here.dtype), here))
            return (loss + here, d_table + more.astype(wide) if trained else None), d_x.astype(wide)

        d_table = comm.varying_like(jnp.zeros(table_VD.shape, wide), table_VD) if trained else None
        start = (zero(x_CRD, table_VD, targets_CR), d_table)
        (loss, d_table), d_x_CRD = lax.scan(body, start, (x_CRD, targets_CR))
        return loss, (d_x_CRD, d_table)

    def backward(kept, d_loss):
        d_x_CRD, d_table = jax.tree.map(lambda each: comm.varying_like(d_loss / seed, each) * each, kept)
        return d_x_CRD.astype(dtype), None if d_table is None else d_table.astype(table_VD.dtype), None

    summed = jax.custom_vjp(total)
    summed.defvjp(forward, backward, symbolic_zeros=True)
    return summed(x_CRD, table_VD, targets_CR)
