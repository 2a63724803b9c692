"""What a privacy report says in words, for people who do not know the field. Every number in it is an upper bound, so
all are rounded up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedward_common.config import RunConfig
from fedward_common.privacy.accounting import Claim
from fedward_common.privacy.ledger import Unit
from fedward_common.privacy.meaning import FALSE_ALARMS, Meaning
from fedward_common.privacy.options import PrivacyOptions

ONE = {Unit.SITE: "one whole site", Unit.PATIENT: "one patient", Unit.RECORD: "one record"}
PATIENT_OF_A_SITE = "one patient of a site"

_HARDLY = 0.99
"""Share of right guesses from which a bound says next to nothing."""


@dataclass(frozen=True)
class Recipient:
    """Who got what, and what ε says about them."""

    who: str
    what: str
    holds: str


def noise(options: PrivacyOptions) -> str:
    """Who adds the noise to what."""
    if options.unit != "site":
        return "noise that each site adds to each step of its training"
    if options.mechanism == "central":
        return "noise that the server adds to the sum of the sites' updates"
    return "noise that the sites add to the sum of their updates, each its share, under masks"


def views(options: PrivacyOptions, colluders: int) -> tuple[str, str]:
    """Against whom the two ε hold. colluders: as in `recipients`."""
    knowing = "the server and everybody else"
    if options.mechanism == "central":
        knowing = "everybody but the server"
    elif options.mechanism == "distributed" and colluders == 0:
        knowing = "the server and everybody else, but not the sites that took part"
    return (
        f"{knowing}, even if they know which sites took part in which round",
        "those who see the models and do not know which sites took part in which round",
    )


def hidden(unit: Unit) -> str:
    """What the neighbours are, for a reader of assumptions that say "unit"."""
    if unit is Unit.SITE:
        return (
            "A unit is a site. Hidden is whether its update is in the sums or nothing in its place; that the site took "
            "part is not. One patient less changes an update into another one, which may be twice as far: hence the "
            "larger ε for a patient."
        )
    if unit is Unit.PATIENT:
        return "A unit is a patient, with all records that one site has of them."
    return "A unit is a record."


def explained(meaning: Meaning) -> tuple[str, ...]:
    """What a bound says, in sentences that need no mathematics."""
    odds = (
        f"Any conclusion that somebody draws from all that was released is at most {up(meaning.factor)} times as "
        "likely with these data as without them, and the other way round, apart from a chance of "
        f"{chance(meaning.delta)}. No odds change by more than that."
    )
    if meaning.factor >= 1e6:
        odds = (
            "With these data a conclusion may be more than a million times as likely as without them: about odds this "
            "says nothing."
        )
    found = [
        odds,
        "Say that somebody thinks it as likely as not that these data were used, and knows everything else. A coin "
        f"would tell them right in 50 % of such cases. With all that was released they are right in at most "
        f"{percent(meaning.right)}.",
        f"If such a test may raise a false alarm for {100 * FALSE_ALARMS:g} of 100 whose data were not used, it finds "
        f"at most {tenths(100 * meaning.found)} of 100 whose data were used.",
    ]
    if meaning.right > _HARDLY:
        found.append("A limit so high does not rule out a test that is nearly always right. Read it as: not protected.")
    return tuple(found)


def recipients(config: RunConfig, colluders: int) -> tuple[Recipient, ...]:
    """Who received what of a run with [privacy]. colluders: sites, at least, that may have sided with the server in
    each round without making the noise less than was asked for."""
    options = config.privacy
    assert options is not None
    others = "The models that they trained on. Of other sites: keys and encrypted shares, no update."
    holds = "ε holds for what is another site's."
    if options.mechanism == "distributed" and colluders == 0:
        holds = (
            "Each site knows its own part of the noise, and with cohorts this small no part was planned to be missing: "
            "against a site that took part, ε is more than what is said here, and is not calculated."
        )
    elif options.mechanism == "distributed":
        holds = f"ε holds against up to {colluders} of them together in a round, and against these with the server."
    servers = {"central": _central, "distributed": _distributed, None: _on_sites}[options.mechanism]
    return (
        *servers(config, colluders),
        Recipient("The sites that took part", others, holds),
        Recipient(
            "The data scientist",
            "The model after each round, and the run's events: which sites took part, when, failures, bytes, seconds, "
            "ε. No loss and no metric of any site's data.",
            "ε holds." + (
                " The events name each round's sites, so the smaller of two numbers does not."
                if options.unit == "site" and config.cohort.size is not None
                else ""
            ),
        ),
        Recipient("Whoever is given a model", "One or more of the models.", "ε holds, whatever is done with them."),
    )


def _distributed(config: RunConfig, colluders: int) -> tuple[Recipient, ...]:
    sees = (
        "In each round one sum of all updates, with the noise in it. Updates arrive under masks that cancel only in "
        "the sum: no single update, weight, loss or metric."
    )
    if config.privacy is not None and config.privacy.noise_on_dropout == "exact":
        sees += " And the spare part of some sites' noise, which it took off the sum; what is left is what ε counts."
    siding = f"also with up to {colluders} of a round's sites on its side" if colluders else "if no site sides with it"
    lying = (
        f"ε holds, {siding}. Before a sum is unmasked, sites agree by signatures on who is in it, so that every sum it "
        "can read has the noise of enough honest sites."
    )
    if config.secure_sum.honest_server:
        lying = (
            "Nothing is claimed: this run takes the server to follow the protocol (secure_sum.honest_server = true). "
            "One that lies about who dropped out could read a single update, with a small part of the noise."
        )
    return (
        Recipient("The server, honest but curious", sees, f"ε holds, {siding}."),
        Recipient("A server that lies", "The same, if the sites keep to the protocol.", lying),
    )


def _on_sites(config: RunConfig, colluders: int) -> tuple[Recipient, ...]:
    return (
        Recipient(
            "The server, honest but curious",
            "In each round one sum of all updates, which were trained under noise. No single update, loss or metric.",
            "ε holds, and it would for a single update: the noise is in each before it leaves its site.",
        ),
        Recipient(
            "A server that lies",
            "The same, or at worst single updates.",
            "ε holds, whatever it does to the secure sum.",
        ),
    )


def _central(config: RunConfig, colluders: int) -> tuple[Recipient, ...]:
    assert config.privacy is not None
    adapts = config.privacy.clip_quantile is not None
    counted = ", and how many of them were within the clip" if adapts else ""
    return (
        Recipient(
            "The server, honest but curious",
            f"In each round the sum of all updates without noise{counted}; the noise it adds afterwards. No single "
            "update, weight, loss or metric.",
            "No ε holds: it saw the sum as it is. The sites that took part trusted it with that.",
        ),
        Recipient(
            "A server that lies",
            "The same, and it can pass on the sum without noise, or with less.",
            "Nothing is claimed, against it or anybody else: nobody but the server can tell how much noise it added.",
        ),
    )


def sampling(config: RunConfig, known: Claim, models_only: Claim, rates: Sequence[float], whole: int) -> str:
    """Why the ε against those who see models only is smaller than the other one, or is not. rates: shares of the
    available sites that were drawn, each under 1. whole: releases to which no draw applies."""
    options = config.privacy
    assert options is not None
    if options.unit != "site":
        return (
            f"The draw of a round's sites is not counted for privacy by {options.unit}: both numbers are the same. "
            f"That each site draws its {options.unit}s for each step, in secret, is counted, against everybody."
        )
    if not rates:
        but = "" if config.cohort.size is None or not whole else ", or a round was tried more than once"
        return f"No site is left out by chance: all that are available are asked{but}. Both numbers are the same."
    share = percent(rates[-1]) if rates[0] == rates[-1] else f"{percent(rates[0])} to {percent(rates[-1])}"
    if not models_only.epsilon < known.epsilon:
        return gains_nothing(share)
    some = f" {whole} releases count whole: nobody was left out, or it was not the first attempt." if whole else ""
    return (
        f"In each round {share} of the available sites were drawn at random, in secret. Who does not know the draws "
        "cannot tell whether a site took part at all: that makes the second number the smaller one (Wang, Balle & "
        f"Kasiviswanathan 2019, theorem 9).{some}"
    )


def gains_nothing(share: str) -> str:
    """Why a draw is not counted."""
    return (
        f"In each round {share} of the available sites are drawn at random. The bound for such draws takes each drawn "
        "site for the replacement of another one, which counts twice; with so large a share that costs more than the "
        "draw gains. For a site both numbers are the same."
    )


def uncovered(config: RunConfig) -> tuple[str, ...]:
    """What no ε of this report is about."""
    options = config.privacy
    assert options is not None
    return (
        *_of_unit(options),
        "Other runs. A site whose data were used in several has to count them all; its own ledger does: 'fedward node "
        "ledger show'.",
        "Choosing among runs. Whoever tries settings on the same data and keeps the best has released them all.",
        "That a site took part, when, how long it took, and why it failed if it did.",
        "What is true of people in general. If a model shows that smokers fall ill more often, that is said of every "
        "smoker, whether or not their data were used. That is what the model is for.",
        "A server that keeps two books. This report is made from the server's ledger; each site has its own, which the "
        "server cannot write.",
    )


def _of_unit(options: PrivacyOptions) -> tuple[str, ...]:
    if options.unit == "site":
        return (
            "The code that the sites approved and ran. It saw their data. Whatever it put into an update was clipped "
            "and noised like everything else, so it is within ε; what it left on a site's own disk is that site's "
            "matter.",
        )
    return (
        "The code that the sites approved and ran. It sees the data beside the steps that clip and noise; no ε bounds "
        "what it sends in place of a gradient. Every number here rests on somebody having read it.",
        "A person with several records. With k of them the factor is to be taken to the power of k, and δ grows, too."
        if options.unit == "record"
        else "A person who is a patient of several sites counts as several.",
    )


def up(value: float) -> str:
    """Three digits, rounded up."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**digits - 1e-9) / 10**digits:.{max(0, digits)}f}"


def tenths(value: float) -> str:
    """One decimal, rounded up."""
    return f"{math.ceil(10 * value - 1e-9) / 10:g}"


def percent(share: float) -> str:
    """A share as per cent with one decimal, rounded up."""
    return f"{tenths(100 * share)} %"


def chance(delta: float) -> str:
    """δ as one in so many."""
    return f"1 in {math.floor(1 / delta + 1e-6):,}"
