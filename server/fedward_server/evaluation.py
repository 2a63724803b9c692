"""How good the model is after a round, and whether it still gets better."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from fedward_common.config import EvaluationOptions
from fedward_common.errors import ConfigError, UpdateError
from fedward_common.messages import Failure, Reason, Reply, Request
from fedward_common.update import Vectors

from fedward_server.aggregation import MetricSums, averages
from fedward_server.checkpoint import Standing
from fedward_server.transport import Transport

Central = Callable[[Vectors], Mapping[str, float]]
"""Evaluates a model ("model", "statistic") on the server's own data: sums over examples, with "examples"."""

Means = dict[str, float] | None


@dataclass(frozen=True)
class Evaluation:
    """Means per example over the run's nodes, over the held-out nodes, and on the server; None where not done."""

    nodes: Means = None
    holdout: Means = None
    central: Means = None
    failures: Mapping[str, Failure] = field(default_factory=dict)

    @property
    def main(self) -> Means:
        """What early stopping and the best checkpoint go by: the nodes' figures, else the server's."""
        return self.nodes if self.nodes is not None else self.central


def due(options: EvaluationOptions, round_: int, rounds: int) -> bool:
    """Whether to evaluate after this round: every so many rounds, and after the last."""
    return options.every > 0 and (round_ % options.every == 0 or round_ == rounds)


def evaluate(
    transport: Transport, requests: Mapping[str, Request], holdout: Collection[str], seconds: float
) -> Evaluation:
    """Have nodes evaluate the model in `requests`; one exchange for those of `holdout` and the others."""
    # A node's policy may ask for a least number of nodes.
    asked = {
        name: replace(request, settings={**request.settings, "cohort": len(requests)})
        for name, request in requests.items()
    }
    sums = {True: MetricSums(), False: MetricSums()}
    failures: dict[str, Failure] = {}
    answered: set[str] = set()
    for name, reply in transport.exchange(asked, seconds):
        if name in answered or name not in asked:
            continue
        answered.add(name)
        failure = _add(sums[name in holdout], asked[name], reply)
        if failure is not None:
            failures[name] = failure
    for name in set(asked) - answered:
        failures[name] = Failure(Reason.NO_REPLY)
    return Evaluation(averages(sums[False].total()), averages(sums[True].total()), None, failures)


def _add(sums: MetricSums, request: Request, reply: Reply) -> Failure | None:
    if reply.failure is not None:
        return reply.failure
    if (reply.run, reply.round, reply.attempt) != (request.run, request.round, request.attempt):
        return Failure(Reason.BAD_UPDATE, "the reply answers another request")
    try:
        if reply.metrics.get("examples", 0.0) < 0:
            raise UpdateError("a negative number of examples")
        sums.add(reply.metrics)
    except UpdateError as error:
        return Failure(Reason.BAD_UPDATE, str(error))
    return None


def judge(standing: Standing, options: EvaluationOptions, round_: int, means: Means) -> Standing:
    """The standing after an evaluation. Without `stop_metric` the best round goes by accuracy, else by loss.

    Raises `ConfigError` if `stop_metric` is not among the metrics.
    """
    if means is None:
        return standing
    metric = options.stop_metric or standing.metric or ("accuracy" if "accuracy" in means else "loss")
    if metric not in means:
        if options.stop_metric is None:
            return standing
        raise ConfigError(
            f"evaluation.stop_metric = {metric!r}: the task gives no such metric, it gives {sorted(means)}. "
            "Name one of these, or drop stop_metric."
        )
    lower_is_better = options.stop_mode == "min" if options.stop_metric else metric == "loss"
    value = means[metric]
    if standing.best is None or _gain(standing.best, value, lower_is_better) > options.stop_min_delta:
        return Standing(metric, value, round_, 0)
    return Standing(metric, standing.best, standing.best_round, standing.stale + 1)


def _gain(best: float, value: float, lower_is_better: bool) -> float:
    return best - value if lower_is_better else value - best


def has_stalled(standing: Standing, options: EvaluationOptions) -> bool:
    """Whether early stopping ends the run."""
    return options.stop_metric is not None and standing.stale >= options.stop_patience
