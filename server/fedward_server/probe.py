"""Whether a Flower strategy needs no more than the weighted mean of its replies: tried on copies of it.

Medians, trimmed means, Krum, server-side clipping and the like give something else from the mean than from the
replies, without any error: a secure sum must not be put under them. A probe is no proof, so strategies that nobody has
read take an explicit yes besides.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from fedward_common.errors import ConfigError
from fedward_common.stock import WEIGHT_KEY
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy

KNOWN = (FedAvg, FedProx, FedAdam, FedYogi, FedAdagrad, FedAvgM)
"""Strategies that have been read: they need weighted means only, whatever the replies."""

_METRICS = ("loss", "accuracy", "train_loss", "eval_loss", "train_acc", "eval_acc")
"""Names in the made-up replies, for aggregation functions that look for some; those of Flower's examples."""
_REPLIES = (5, 12)
_ROUNDS = 2
_SIZES = (1.0, 1000.0)
"""How far apart replies are, small and large, so that what clips has to clip."""
_TOLERANCE = 1e-6
_NODES = 1024

Outcome = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
"""Arrays, training metrics, evaluation metrics."""


def check(strategy: Strategy, accept_unknown: bool, metrics: tuple[str, ...] = ()) -> None:
    """Raises `ConfigError`, with the reason, if `strategy` must not be wrapped.

    metrics: more names that its aggregation functions look for. Copies of the strategy are run: what it does besides
    (writing files, say) happens too.
    """
    name = type(strategy).__name__
    seed = 0
    with _aside():
        for replies in _REPLIES:
            for size in _SIZES:
                seed += 1
                try:
                    problem = _difference(strategy, np.random.default_rng(seed), replies, size, metrics)
                except Exception as error:
                    said = f"{type(error).__name__}: {error}".rstrip(".")
                    raise ConfigError(
                        f"SecureSum({name}): it does not take the replies that it was tried with: {said}. If it looks "
                        'for metrics of other names, give them: SecureSum(…, metrics=("f1",)); else it cannot run '
                        "under a secure sum."
                    ) from error
                if problem:
                    raise ConfigError(
                        f"SecureSum({name}): from {replies} replies and from their weighted mean it makes different "
                        f"{problem}. It needs single replies, or adds noise; a secure sum gives the weighted mean "
                        f"only. Use one of {_known()}, with metrics that are averaged, or run it without SecureSum."
                    )
    if type(strategy) not in KNOWN and not accept_unknown:
        raise ConfigError(
            f"SecureSum({name}): not one of {_known()}. It made the same from random replies and from their weighted "
            "mean, which is no proof: pass accept_unknown=True if you know that it needs weighted means only."
        )


def _known() -> str:
    return ", ".join(known.__name__ for known in KNOWN)


def _difference(
    strategy: Strategy, rng: np.random.Generator, count: int, size: float, metrics: tuple[str, ...]
) -> str:
    """What came out differently from `count` replies and from their weighted mean; empty if nothing did."""
    weight = str(getattr(strategy, "weighted_by_key", WEIGHT_KEY))
    of_replies, of_mean = copy.deepcopy(strategy), copy.deepcopy(strategy)
    arrays = {"weight": rng.normal(size=(3, 4)), "bias": rng.normal(size=4)}
    for round_ in range(1, _ROUNDS + 1):
        replies = [_reply(rng, arrays, size, (*_METRICS, *metrics), weight) for _ in range(count)]
        many = _outcome(of_replies, round_, arrays, replies)
        one = _outcome(of_mean, round_, arrays, [_mean(replies, weight)])
        if not many[0]:
            raise ValueError("no arrays came out")
        for what, ours, theirs in zip(("arrays", "training metrics", "evaluation metrics"), many, one, strict=True):
            if set(ours) != set(theirs):
                return f"{what}: {sorted(ours)} and {sorted(theirs)}"
            for name, value in ours.items():
                scale = max(1.0, float(np.abs(value).max()))
                gap = float(np.abs(np.asarray(value) - np.asarray(theirs[name])).max())
                if not gap <= _TOLERANCE * scale:  # false for NaN
                    return f"{what} ({name!r} by up to {gap:.3g})"
        arrays = dict(many[0])
    return ""


Reply = tuple[dict[str, Any], dict[str, float]]


def _reply(
    rng: np.random.Generator, arrays: Mapping[str, Any], size: float, names: tuple[str, ...], weight: str
) -> Reply:
    moved = {name: value + size * rng.normal(size=value.shape) for name, value in arrays.items()}
    return moved, {weight: int(rng.integers(1, 100)), **{name: rng.uniform() for name in names}}


def _mean(replies: list[Reply], weight: str) -> Reply:
    weights = np.array([metrics[weight] for _, metrics in replies])
    arrays, metrics = replies[0]
    mean_arrays = {n: np.average([a[n] for a, _ in replies], axis=0, weights=weights) for n in arrays}
    means = {n: float(np.average([m[n] for _, m in replies], weights=weights)) for n in metrics if n != weight}
    return mean_arrays, {weight: int(weights.sum()), **means}


def _outcome(strategy: Strategy, round_: int, arrays: Mapping[str, Any], replies: list[Reply]) -> Outcome:
    broadcast = ArrayRecord({name: Array(value) for name, value in arrays.items()})
    nodes = [_NODES, *(getattr(strategy, key, 0) for key in ("min_available_nodes", "min_train_nodes"))]
    grid = cast(Grid, _Nodes(max(nodes)))
    list(strategy.configure_train(round_, broadcast, ConfigRecord(), grid))
    made, trained = strategy.aggregate_train(round_, [_message(*reply, "train") for reply in replies])
    evaluated = strategy.aggregate_evaluate(round_, [_message({}, metrics, "evaluate") for _, metrics in replies])
    return {name: array.numpy() for name, array in (made or {}).items()}, dict(trained or {}), dict(evaluated or {})


def _message(arrays: Mapping[str, Any], metrics: Mapping[str, float], kind: str) -> Message:
    content = RecordDict({"metrics": MetricRecord(dict(metrics))})
    if arrays:
        content["arrays"] = ArrayRecord({name: Array(np.array(value)) for name, value in arrays.items()})
    return Message(content, reply_to=Message(RecordDict(), 1, kind))


class _Nodes:
    """As much of a grid as the choice of a cohort asks for."""

    def __init__(self, count: int) -> None:
        self._ids = list(range(1, count + 1))

    def get_node_ids(self) -> list[int]:
        return self._ids


@contextmanager
def _aside() -> Iterator[None]:
    """Without a trace in Flower's log or in the random numbers that the run will draw."""
    log, states = logging.getLogger("flwr"), (random.getstate(), np.random.get_state())
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
