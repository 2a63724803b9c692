"""Control variates by SCAFFOLD's option II (Karimireddy et al. 2020, Alg. 1), which FedDC has too.

c_i⁺ = c_i − c − Δ_i/m, m the mass of the node's steps (`Trained.mass`): the mean gradient that its steps followed, but
for the correction c − c_i. The server's c is the mean of the c_i over all N nodes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedward_common.algorithms.base import DELTA, Cohort, ServerState, moved
from fedward_common.algorithms.local_options import LocalOptions, mass
from fedward_common.update import Update, Vector

CONTROL = "c"
"""Server control variate c, in the server's state and in broadcasts."""
NODE_CONTROL = "c_i"
DELTA_CONTROL = "delta_c"


def renewed(c_i: Vector, c: Vector, delta: Vector, mass_: float) -> Vector:
    """c_i⁺, in the dtype of c_i."""
    return (c_i - c - delta / mass_).astype(c_i.dtype, copy=False)


def completed(server: ServerState, mean: Update, local: LocalOptions) -> Update:
    """`mean` with mean_S(c_i⁺ − c_i) = −c − mean_S Δ_i/m, if every node did the same steps: one m for all."""
    delta_c = np.zeros_like(mean.groups[DELTA])
    delta_c -= server.vectors[CONTROL]
    delta_c -= mean.groups[DELTA] / mass(local, server.round + 1)
    return replace(mean, groups={**mean.groups, DELTA_CONTROL: delta_c})


def advanced_control(server: ServerState, mean: Update, cohort: Cohort) -> Vector:
    """c + (|S|/N) mean_S(c_i⁺ − c_i)."""
    return moved(server.vectors[CONTROL], mean.groups[DELTA_CONTROL], cohort.replied / cohort.enrolled)


def steps_problem(name: str, local: LocalOptions, max_corrected_norm: float | None) -> str | None:
    """Why `name` cannot work with steps that differ by node, or None."""
    if local.epochs is None or max_corrected_norm is not None:
        return None
    return (
        f"local.epochs = {local.epochs} gives nodes different numbers of steps, with which {name} "
        "can run away. Give local.steps instead, or clip with algorithm.max_corrected_norm."
    )
