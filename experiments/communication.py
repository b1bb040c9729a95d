"""What a step sends, by purpose, for one layout; and how far it is from the papers' forms, for four. Nothing runs.

python -m experiments.communication

Last, for every named strategy, how much is sent for each byte that the strategy cannot do without (`least`).
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import jax
from rich.console import Console

from jaxdist.config import ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.layout import Layout
from jaxdist.mesh import parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.placement import make_layout
from jaxdist.plan.papers import formulas
from jaxdist.plan.proof.trace import total_sent
from jaxdist.plan.traffic import predicted, table

from .bench.theory import halves_again
from .cli import run_program
from .progress import Progress
from .strategies import STRATEGIES


@dataclass(frozen=True)
class CommunicationFlags:
    """Print what a step sends, by purpose, for one layout of 7B; beside the papers' forms, for four; and, for every
    named strategy, beside the least that it can do with. It takes no flags. Nothing is run.
    """


def example(mesh: str, **parallel) -> RunConfig:
    """The 7b preset in bf16, its gradients summed in fp32, 512 sequences an update."""
    strategy = ParallelConfig(mesh=parse_mesh(mesh), **parallel)
    return RunConfig(PRESETS["7b"], strategy, precision=PrecisionConfig(dtype="bfloat16"), batch_size=512)


EXAMPLE = example("pp=4,dp=8,tp=8", zero=1, sp=True, microbatches=16)
COMPARED = {
    "ZeRO-1": EXAMPLE,
    "ZeRO-1, block recompute": example("pp=4,dp=8,tp=8", zero=1, sp=True, microbatches=16, remat="block"),
    "ZeRO-3": example("pp=4,dp=8,tp=8", zero=3, sp=True, microbatches=16),
    "ZeRO-3, no pipeline": example("dp=32,tp=8", zero=3, sp=True, accumulate=16),
}


def layout_of(config: RunConfig) -> Layout:
    return make_layout(config.model, config.parallel, config.part_layers)


def against_papers(config: RunConfig) -> list[tuple[str, float, float]]:
    """(what, elements by the papers, elements predicted) that one device sends, for ZeRO-1 to 3 in bf16 under sp."""
    parallel, mesh, shape = config.parallel, config.parallel.mesh, formulas.ModelShape.of(config.model)
    micro = parallel.accumulate * parallel.num_microbatches
    rows, messages = config.batch_size // (mesh.replica * mesh.dp * micro), predicted(config, layout_of(config))

    def sent(axis: str, *purposes: str, itemsize: int = 2) -> float:
        found = [m for m in messages if m.purpose.startswith(purposes) and m.axes == (axis,)]
        return total_sent(found, mesh) / itemsize

    dp = formulas.dp_traffic(shape.parameters / (mesh.pp * mesh.tp), mesh.dp, parallel.zero, microbatches=micro)
    block = formulas.tp_traffic(shape, rows, mesh.tp, parallel.sp, full_recompute=parallel.recomputes)
    boundary = formulas.pp_traffic(shape, rows, mesh.tp, scatter_gather=parallel.sp)
    moved = sent("dp", "weights", "parameters") + sent("dp", "gradients", itemsize=4)
    found = [
        ("weights and gradients over dp", dp.elements, moved),
        ("layers over tp", block.elements * micro * shape.num_layers / mesh.pp, sent("tp", "layers")),
    ]
    if mesh.pp > 1:
        found.append(("between stages", 2 * micro * boundary.elements, sent("pp", "between stages")))
    return found


ACTIVATIONS = ("embedding", "layers", "loss")
# What is sent, by the starts of purposes, and by the axes where these say it.
KINDS = {
    "activations over tp": (ACTIVATIONS, ("tp",)),
    "keys and values over cp": (ACTIVATIONS, ("cp",)),
    "between stages": (("between stages",), None),
    "weights and gradients": (("weights", "gradients", "parameters"), None),
}


def least(config: RunConfig) -> dict[str, float]:
    """Bytes that a device sends at the least in a step of this strategy, by what they are for; numbers are left out.

    Every layer's activations: a sum twice forward and twice backward, and again what a recomputed group needs inside.
    Over cp what `formulas.cp_traffic` says, and its forward again where a group is recomputed.
    What a stage has for another: each micro-batch once. Every leaf, unpadded: its gradient summed once (over all
    stages, where they hold it whole), or scattered where it is made; its weights gathered once for each use. What is
    not a block's: once a step under pp, of the table a part to each end and its gradient from there. The head's
    backward uses what its forward gathered, and the last block's with overlap. A block's backward uses no vectors.
    """
    parallel, mesh, layout = config.parallel, config.parallel.mesh, layout_of(config)
    item, reduced, master = (
        jax.numpy.dtype(name).itemsize
        for name in (config.precision.dtype, config.precision.reduction_dtype, config.precision.master_dtype)
    )
    micros, schedule, parts = parallel.accumulate * parallel.num_microbatches, parallel.pipeline, config.part_layers
    homes = [0 if schedule is None else schedule.place(part)[0] for part in range(len(parts))]
    hops = [pair for a, b in pairwise(homes) if a != b for pair in (a, b)]  # forward from a, backward from b
    leaving = max(hops.count(stage) for stage in range(mesh.pp))
    rows = config.batch_size // (mesh.batch_ranks * micros)
    tokens = rows * config.model.seq_len // mesh.cp
    activation, sp = tokens * config.model.width * item, parallel.sp
    every = max(parts) if parallel.remat == "chunk" else parallel.remat_every

    def part(n: int) -> float:
        return (n - 1) / n

    # In halves of an all-reduce: gathers or scatters. Recomputed: every sum but a group's last, and gathers with sp.
    again = ((2 if sp else 0) + (1 if sp else 2) * (2 - 1 / every)) if every else 0
    again += halves_again(parallel)
    softmax, needs, most = 2 * 3 * tokens * master, [], 0
    for stage in range(mesh.pp):
        layers = sum(n for n, home in zip(parts, homes, strict=True) if home == stage)
        embeds, heads = homes[0] == stage, homes[-1] == stage
        most = max(most, layers)
        halves = layers * (8 + again) + 2 * (embeds + heads)
        needs.append(halves * activation + heads * softmax)
    found = {"activations over tp": micros * part(mesh.tp) * max(needs)}
    exchanging, gathers = parallel.cp_split
    shape, groups = formulas.ModelShape.of(config.model), mesh.cp // exchanging
    context = formulas.cp_traffic(shape, rows, groups, exchanging, gathers, mesh.tp, item, master)
    found["keys and values over cp"] = micros * most * ((2 if every else 1) * context.forward + context.backward)
    found["between stages"] = micros * leaving * activation / (mesh.tp if sp else 1)

    total = 0.0
    for leaf in jax.tree.leaves(layout.leaves):
        size, block = math.prod(leaf.used_local), leaf.name.startswith("blocks")
        if leaf.consumer_stages:
            size /= mesh.pp
            at_an_end = (len(leaf.consumer_stages) - 1) * item + (mesh.pp - 1) * reduced
            total += size * max(at_an_end, min(mesh.pp - 1, len(leaf.consumer_stages)) * item)
        rest = math.prod(mesh.size(axis) for axis in leaf.shard_reduce_axes)
        shards = leaf.num_shards if layout.sharded else 1
        total += 2 * part(rest) * size / shards * reduced
        uses = 1 if block else len(leaf.used_in)
        if not block and (mesh.pp > 1 or not (parallel.zero == 3 and parallel.reshard_after_forward)):
            uses = 1 / micros if mesh.pp > 1 else 1 / parallel.num_microbatches
        times = micros * uses
        scatters = micros * min(uses, 1) if layout.grads_sharded else 1
        total += part(shards) * size * reduced * scatters
        if layout.params_sharded:
            twice = block and ((not leaf.small and (parallel.reshard_after_forward or schedule)) or every)
            once = (
                1 / config.model.num_layers if parallel.overlap_layers else 0
            )  # the last block, for forward and backward
            total += part(shards) * size * item * times * (2 - once if twice else 1)
        else:
            total += part(shards) * size * item
    return found | {"weights and gradients": total}


def ratios(config: RunConfig) -> dict[str, float]:
    """Bytes sent for each byte of `least`, where there are any."""
    messages, mesh = predicted(config, layout_of(config)), config.parallel.mesh
    sent = {
        kind: total_sent((m for m in messages if m.purpose.startswith(names) and axes in (None, m.axes)), mesh)
        for kind, (names, axes) in KINDS.items()
    }
    return {kind: sent[kind] / at_least for kind, at_least in least(config).items() if at_least}


def main(flags: CommunicationFlags, console: Console) -> None:
    mesh = EXAMPLE.parallel.mesh
    print(f"One step of 7b on {mesh} (bf16, fp32 gradients, ZeRO-1, sp, 16 micro-batches of 4 sequences):\n")
    print("| purpose | collective | over | messages | bytes sent |\n|---|---|---|--:|--:|")
    for row in table(predicted(EXAMPLE, layout_of(EXAMPLE)), mesh):
        print(f"| {row.purpose} | {row.kind} | {row.axes} | {row.count:,} | {row.sent_bytes:,} |")
    print("\nMillions of elements that a device sends:\n")
    print("| layout | what | papers | ours | difference |\n|---|---|--:|--:|--:|")
    for name, config in COMPARED.items():
        for what, papers, ours in against_papers(config):
            figures = f"{papers / 1e6:,.1f} | {ours / 1e6:,.1f} | {ours / papers - 1:+.1%}"
            print(f"| {name}, {config.parallel.mesh} | {what} | {figures} |")
    print("\nBytes sent for each byte that the strategy needs at the least:\n")
    print(f"| strategy | {' | '.join(KINDS)} |\n|---|{'--:|' * len(KINDS)}")
    with Progress("tracing strategies") as progress:
        for number, strategy in enumerate(STRATEGIES):
            progress.update(number, len(STRATEGIES))
            found = ratios(strategy.run_config())
            if found:
                print(f"| {strategy.name} | {' | '.join(f'{found[k]:.3f}' if k in found else '' for k in KINDS)} |")


if __name__ == "__main__":
    run_program(CommunicationFlags, main, "communication")
