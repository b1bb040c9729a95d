"""What a step sends, by purpose, for one layout; and how far it is from the papers' forms, for four. Nothing runs.

python -m experiments.communication
"""

from jaxdist import model
from jaxdist.config import PRESETS, ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.layout import Layout, make_layout
from jaxdist.mesh import parse_mesh
from jaxdist.plan import formulas
from jaxdist.plan.communication import predicted, table


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
    return make_layout(model.declare(config.model), config.parallel, config.part_layers)


def against_papers(config: RunConfig) -> list[tuple[str, float, float]]:
    """(what, elements by the papers, elements predicted) that one device sends, for ZeRO-1 to 3 in bf16 under sp."""
    parallel, mesh, shape = config.parallel, config.parallel.mesh, formulas.ModelShape.of(config.model)
    micro = parallel.accumulate * parallel.num_microbatches
    rows, messages = config.batch_size // (mesh.replica * mesh.dp * micro), predicted(config, layout_of(config))

    def sent(axis: str, *purposes: str, itemsize: int = 2) -> float:
        found = [m for m in messages if m.purpose.startswith(purposes) and m.axes == (axis,)]
        return sum(message.sent_bytes(mesh) for message in found) / itemsize

    dp = formulas.dp_traffic(shape.parameters / (mesh.pp * mesh.tp), mesh.dp, parallel.zero, microbatches=micro)
    block = formulas.tp_traffic(shape, rows, mesh.tp, parallel.sp, full_recompute=parallel.remat_every > 0)
    boundary = formulas.pp_traffic(shape, rows, mesh.tp, scatter_gather=parallel.sp)
    moved = sent("dp", "weights", "parameters") + sent("dp", "gradients", itemsize=4)
    found = [
        ("weights and gradients over dp", dp.elements, moved),
        ("blocks over tp", block.elements * micro * shape.num_layers / mesh.pp, sent("tp", "blocks")),
    ]
    if mesh.pp > 1:
        found.append(("between stages", 2 * micro * boundary.elements, sent("pp", "between stages")))
    return found


def main() -> None:
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


if __name__ == "__main__":
    main()
