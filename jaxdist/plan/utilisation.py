"""MFU and HFU of a run, on accelerators whose peak the hardware table has.

Model FLOPs are those of the products in a forward and in the gradients that are trained, read from a trace of the
model (`plan.parts`). Of attention these are the blocks of scores that are not masked as a whole: at 1,024 positions 5/8
of the square, all of which PaLM counts (arXiv 2204.02311, appendix B), so ours is never above that. Hardware FLOPs add
the forward that recomputation repeats. Both are over the dense peak of the run's dtype.
"""

from dataclasses import dataclass

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.plan.kept_arrays import choice_of
from jaxdist.plan.parts import work_of
from jaxdist.plan.program_memory import rank_of
from jaxdist.plan.verdict import known_hardware
from jaxdist.runtime.devices import Devices


@dataclass(frozen=True)
class Utilisation:
    """FLOPs of one step, and FLOP/s of all devices at their peak."""

    model_flops: float
    hardware_flops: float
    peak: float

    def of(self, seconds: float) -> dict[str, float]:
        """{"mfu", "hfu"} of a step that took so long."""
        return {"mfu": self.model_flops / seconds / self.peak, "hfu": self.hardware_flops / seconds / self.peak}


def utilisation_of(config: RunConfig, devices: Devices) -> Utilisation | None:
    """None on simulated devices, and on those whose peak for the dtype is not known."""
    hardware = None if devices.simulated else known_hardware(devices.devices[0].device_kind)
    if hardware is None:
        return None
    try:
        peak = hardware.peak(config.precision.dtype)
    except ConfigError:
        return None
    tokens = config.batch_size * config.model.seq_len
    model, again = flops_per_token(config)
    return Utilisation(tokens * model, tokens * (model + again), peak * config.parallel.mesh.num_devices)


def flops_per_token(config: RunConfig) -> tuple[float, float]:
    """(of the model, of what recomputation repeats).

    A layer that runs again by itself stops before its last product, whose result no gradient needs; selective
    recomputation repeats the scores, and not their product with the values, for the same reason.
    """
    work, parallel = work_of(config.model), config.parallel
    layer, scores = sum(p.flops for p in work.layer), sum(p.flops for p in work.layer if p.batched) / 2
    again = layer - work.layer[-1].flops if parallel.remat_every == 1 else layer
    if not parallel.recomputes:
        again = scores if parallel.remat == "selective" else _repeated(config)
    return work.flops_per_token, work.num_layers * again


def _repeated(config: RunConfig) -> float:
    """FLOPs a token of the arrays of a layer that `remat` names, on all ranks of tp; 0 where it names none."""
    if not config.parallel.repeats_arrays:
        return 0.0
    attention = config.model.attention_for(config.attention, "gpu", config.precision.dtype, training=True)
    found = choice_of(rank_of(config, attention)).repeated
    return (found.flops + found.attention) * config.parallel.mesh.tp
