"""What may be wrapped: strategies to which a cohort's weighted mean is as good as its replies."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from fedward_common.errors import ConfigError
from fedward_server.probe import check
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)


@pytest.mark.parametrize(
    "strategy",
    [
        FedAvg(),
        FedAvg(min_available_nodes=2000, fraction_train=0.0, weighted_by_key="n"),
        FedProx(proximal_mu=0.1),
        FedAdam(beta_1=0.5),
        FedYogi(),
        FedAdagrad(),
        FedAvgM(server_momentum=0.9, server_learning_rate=0.5),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_the_six_pass(strategy: Strategy) -> None:
    drawn = random.getstate(), np.random.get_state()[1].tolist()
    check(strategy, accept_unknown=False)
    # The run that follows draws the cohorts that it would have drawn without the probe, and starts afresh.
    assert drawn == (random.getstate(), np.random.get_state()[1].tolist())
    assert getattr(strategy, "current_arrays", None) is None


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (FedMedian(), "different arrays"),
        (FedTrimmedAvg(), "different arrays"),
        (Krum(), "different arrays"),
        (MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3), "different arrays"),
        (Bulyan(num_malicious_nodes=0), "different arrays"),
        (QFedAvg(client_learning_rate=0.1), "different arrays"),
        (DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 10.0, 5), "different arrays"),
        # Clipping alone, without noise.
        (DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 10.0, 5), "different arrays"),
        (DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 10.0, 5), "different arrays"),
        (DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, 50), "different arrays"),
        (DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 1.0, 50), "does not take the replies"),
        (FedXgbBagging(), "does not take the replies"),
        (FedXgbCyclic(), "different arrays"),
    ],
    ids=lambda found: type(found).__name__ if isinstance(found, Strategy) else "",
)
def test_what_needs_single_replies_is_refused_with_the_reason(strategy: Strategy, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        check(strategy, accept_unknown=True)
    assert type(strategy).__name__ in str(refused.value)


def largest(records: list[RecordDict], weight: str) -> MetricRecord:
    return MetricRecord({"loss": max(float(str(record["metrics"]["loss"])) for record in records)})


def of_mine(records: list[RecordDict], weight: str) -> MetricRecord:
    weights = [record["metrics"][weight] for record in records]
    return MetricRecord({"f1": float(np.average([record["metrics"]["f1"] for record in records], weights=weights))})


@pytest.mark.parametrize("where", ["train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"])
def test_metrics_must_be_averaged_too(where: str) -> None:
    with pytest.raises(ConfigError, match=r"(training|evaluation) metrics \('loss'"):
        check(FedAvg(**{where: largest}), accept_unknown=False)
    with pytest.raises(ConfigError, match="metrics of other names"):
        check(FedAvg(**{where: of_mine}), accept_unknown=False)
    check(FedAvg(**{where: of_mine}), accept_unknown=False, metrics=("f1",))


class Mine(FedAvg):
    """Somebody's own."""


class Holding(FedAvg):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Dropping(FedAvg):
    """Wants more replies than one."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        found = list(replies)
        return super().aggregate_train(server_round, found) if len(found) > 1 else (None, None)


def test_a_strategy_that_nobody_has_read_takes_an_explicit_yes() -> None:
    with pytest.raises(ConfigError, match="accept_unknown=True"):
        check(Mine(), accept_unknown=False)
    check(Mine(), accept_unknown=True)


@pytest.mark.parametrize(
    ("strategy", "reason"), [(Holding(), "does not take the replies"), (Dropping(), "different arrays")]
)
def test_no_yes_helps_what_fails_the_probe(strategy: Strategy, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(strategy, accept_unknown=True)
