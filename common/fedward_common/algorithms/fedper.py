"""FedPer: the last layers are personal."""

from __future__ import annotations

from typing import Literal

from fedward_common.algorithms.head import HeadOptions, PrivateHead


class FedPerOptions(HeadOptions):
    """`[algorithm] name = "fedper"`."""

    name: Literal["fedper"] = "fedper"


class FedPer(PrivateHead[FedPerOptions]):
    """Arivazhagan et al. 2019 ("Federated learning with personalization layers"), Alg. 1: body and head are trained
    together by each node's K steps; the body is averaged, W_B ← W_B + η_g Σ n_i Δ_i / Σ n_i, the head stays."""

    Options = FedPerOptions
