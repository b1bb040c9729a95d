"""A pipeline schedule as the executor reads it: tables of integers, buffer slots, sets of senders; no JAX.

`jaxdist.parallel.pipeline.lowering.lower` makes them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

NOWHERE = -1
FROM_BEFORE, FROM_AFTER, FROM_SELF = "from_before", "from_after", "from_self"
ARRIVALS = {FROM_BEFORE: 1, FROM_AFTER: -1, FROM_SELF: 0}  # where a message comes from -> shift of the permute


class Loop(StrEnum):
    """Names of the executor's loops. They stay in the program, where `jaxdist.plan.proof` counts what a loop sends."""

    EMBED = "embed"
    LAYERS_FORWARD = "layers_forward"
    GROUPS_FORWARD = "groups_forward"
    HEAD = "head"
    GROUPS_BACKWARD = "groups_backward"
    LAYERS_AGAIN = "layers_again"
    LAYERS_INPUT_GRADIENT = "layers_input_gradient"
    LAYERS_WEIGHT_GRADIENT = "layers_weight_gradient"
    EMBED_GRADIENT = "embed_gradient"


def sending(direction: str, index: int) -> str:
    """The name of the function that sends in one direction (a key of `ARRIVALS`), from the set of senders `index`."""
    return f"{direction}_{index}"


class Instructions(NamedTuple):
    """A schedule as the executor reads it: int32[ticks, S] each; a slot of -1 stands for none.

    phase: that of the action, 0 where the stage idles. first, last: whether the chunk is the first or last part of the
    model. slot_in: the slot of the action's input among the messages. slot_x: of the input that F saves for R. slot_b,
    slot_w, slot_bw: the slots of the residuals that F (or R) saves for B, of those for W, and of the values that B
    saves for W. from_before, from_after, from_self: the slot for the message that arrives by the end of the tick from
    the stage before, the stage after, and this stage.
    """

    phase: Any
    microbatch: Any
    chunk: Any
    first: Any
    last: Any
    slot_in: Any
    slot_x: Any
    slot_b: Any
    slot_w: Any
    slot_bw: Any
    from_before: Any
    from_after: Any
    from_self: Any


class Senders(NamedTuple):
    """The stages whose messages in one direction arrive by the end of a tick: sets[which[tick] - 1], or none for 0."""

    sets: list[tuple[int, ...]]
    which: np.ndarray


@dataclass(frozen=True)
class Lowered:
    """Instructions; the part of the model that each chunk of each stage is; by direction, which stages send; and the
    number of slots of each buffer: the most that any stage has in use at once."""

    instructions: Instructions
    parts: tuple[tuple[int, ...], ...]
    senders: dict[str, Senders]
    num_messages: int
    num_inputs: int
    num_b_residuals: int
    num_w_residuals: int
    num_b_to_w: int
