"""A privacy report as one HTML file: no script, no font, image or link from elsewhere, readable in light and dark and
on paper. The file is XML too, so that a test can read it with a strict parser."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape

from fedward_common.privacy.report import PrivacyReport, Spent
from fedward_common.privacy.wording import chance, up

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5b6470; --paper: #ffffff; --box: #f3f5f7; --line: #d5dae0;
  --one: #0b5cad; --two: #b4540a; --warn: #a3161a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --dim: #a0a9b4; --paper: #14171a; --box: #1f2429;
  --line: #3a424b; --one: #6cb2ff; --two: #f2a25c; --warn: #ff8d8d; } }
@media print { :root { color-scheme: light; --ink: #000; --dim: #444; --paper: #fff; --box: #fff; --line: #999;
  --one: #0b5cad; --two: #b4540a; --warn: #a3161a; } section, figure, tr, .card { break-inside: avoid; }
  h2 { break-after: avoid; } }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 50rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0; }
p, ul { margin: .5rem 0; } li { margin: .3rem 0; } .dim { color: var(--dim); } .warn { color: var(--warn); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1.2rem 0; }
.card { background: var(--box); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.45rem; line-height: 1.3; }
.card span { color: var(--dim); font-size: .87rem; }
.person { margin: .8rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; } .wide { overflow-x: auto; }
th { text-align: left; color: var(--dim); font-weight: 600; }
th, td { border-bottom: 1px solid var(--line); padding: .45rem .8rem .45rem 0; vertical-align: top; }
code { font: .87em/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
figure { margin: 0; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .axis { stroke: var(--line); } svg .one { stroke: var(--one); fill: none; stroke-width: 2.5; }
svg .two { stroke: var(--two); fill: none; stroke-width: 2.5; stroke-dasharray: 7 4; }
svg .limit { stroke: var(--warn); stroke-dasharray: 2 4; stroke-width: 1.5; }
figcaption { color: var(--dim); font-size: .93rem; }
figcaption .one { color: var(--one); } figcaption .two { color: var(--two); }
svg text.limit { fill: var(--warn); stroke: none; }
"""
_MARKS = {"one": "━━", "two": "╍╍"}
"""How a line looks, for a legend in words."""
_MOST = 30
"""Rows of events or attempts that are shown."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 300, 52, 16, 16, 44


def page(report: PrivacyReport) -> str:
    """The whole file, as text."""
    parts = (
        _head(report),
        _section("What it means for one person", _persons(report)),
        _section("ε over the rounds", _figure(report)),
        _section("What was released", _released(report)),
        _section("Who received what", _recipients(report)),
        _section("What the numbers rest on", _rests_on(report)),
        _section("Attempts that gave no model, and were counted", _lost(report)),
        _section("What this report does not cover", _list(report.uncovered)),
        _section("The ledger behind it", _ledger(report)),
    )
    title = escape(f"Privacy report: {report.name}")
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{''.join(parts)}</body>\n</html>\n"
    )


def _head(report: PrivacyReport) -> str:
    status = report.status.replace("_", " ")
    reason = f": {report.reason}" if report.reason else ""
    planned = f"of {report.of:,} planned"
    cards = [
        (f"ε = {_epsilon(report.claim.epsilon)}", f"for {report.unit}s, all rounds together"),
        (f"δ = {report.delta:g}", chance(report.delta)),
        (f"{report.rounds:,} rounds", planned),
    ]
    if report.unseen.epsilon < report.claim.epsilon:
        told = "for those who see models and do not know who took part"
        cards.insert(1, (f"ε = {_epsilon(report.unseen.epsilon)}", told))
    if report.budget is not None and report.left is not None:
        cards.append((f"{report.left:.3g} left", f"of a budget of ε = {report.budget:g}"))
    shown = "".join(f'<div class="card"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in cards)
    return (
        f"<header><h1>Privacy report: {escape(report.name)}</h1>\n"
        f'<p class="dim">Run <code>{escape(report.run)}</code>, {escape(status + reason)}. '
        f"Made on {escape(report.made)}.</p>\n"
        f"<p>Hidden is what each <b>{report.unit}</b> adds, by {escape(report.noise)}. The smaller ε, the better it is "
        "hidden; ε = 0 would be perfect.</p>\n"
        f'<div class="cards">{shown}</div></header>\n'
    )


def _persons(report: PrivacyReport) -> str:
    text = (
        "<p>These are limits for the best conceivable test, by somebody who knows everything else. They hold whatever "
        "is found out later. Attacks that are known mostly do much worse.</p>\n"
    )
    for person in report.persons:
        factor = "over a million" if person.meaning.factor >= 1e6 else up(person.meaning.factor)
        epsilon = _epsilon(person.meaning.epsilon)
        text += (
            f'<div class="card person"><h3>For {escape(person.who)}</h3>\n'
            f'<p class="dim">Against {escape(person.whom)}. ε = {epsilon}, e<sup>ε</sup> = {factor}</p>\n'
            f"{_list(person.words)}</div>\n"
        )
    return text


def _figure(report: PrivacyReport) -> str:
    points = [each for each in report.spent if math.isfinite(each.epsilon)]
    if not points:
        return "<p>No round spent an amount that can be drawn.</p>\n"
    lines: list[tuple[str, str, Sequence[float]]] = [
        ("one", "Against those who know who took part", [each.epsilon for each in points])
    ]
    if any(each.unseen < each.epsilon for each in points):
        lines.append(("two", "Against those who see models only", [each.unseen for each in points]))
    keys = " ".join(f'<span class="{kind}">{_MARKS[kind]} {name}.</span>' for kind, name, _ in lines)
    return (
        f"<figure>{_svg(points, lines, report.budget)}<figcaption>ε after each round, all rounds up to it together. "
        f"{keys}</figcaption></figure>\n"
    )


def _svg(points: Sequence[Spent], lines: Sequence[tuple[str, str, Sequence[float]]], budget: float | None) -> str:
    last = max(each.round for each in points)
    most = max(max(values) for _, _, values in lines)
    drawn = budget if budget is not None and budget <= 3 * most else None
    step = _step(max(most, drawn or 0.0))
    top = step * math.ceil(max(most, drawn or 0.0) / step * (1 + 1e-9))

    def x(number: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * number / last, 1)

    def y(epsilon: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * epsilon / top, 1)

    label = f"ε grows to {most:.3g} in round {last}"
    svg = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">']
    for tick in range(round(top / step) + 1):
        at = y(tick * step)
        svg.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        svg.append(f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{tick * step:g}</text>')
    for number in sorted({round(last * quarter / 4) for quarter in range(5)}):
        svg.append(f'<text x="{x(number)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{number:,}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    svg.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">round</text>')
    if drawn is not None:
        svg.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(drawn)}" y2="{y(drawn)}"/>')
        svg.append(f'<text class="limit" x="{_LEFT + 6}" y="{y(drawn) - 5}">budget {drawn:g}</text>')
    for kind, _, values in lines:
        path = " ".join(f"{x(each.round)},{y(value)}" for each, value in zip(points, values, strict=True))
        svg.append(f'<polyline class="{kind}" points="{x(0)},{y(0)} {path}"/>')
    return "".join(svg) + "</svg>"


def _step(most: float) -> float:
    """Distance of marks on an axis: 1, 2 or 5 times a power of ten, for four to eight of them."""
    power = 10.0 ** math.floor(math.log10(most / 4)) if most > 0 else 1.0
    return next((power * step for step in (1, 2, 5) if most / (power * step) <= 8), 10 * power)


def _released(report: PrivacyReport) -> str:
    z = "" if report.noise_multiplier is None else f", noise multiplier {report.noise_multiplier:.6g}"
    text = (
        f"<p>In each round the sum of the sites' updates with noise (clip {report.clip:g}{z}), and what follows from "
        f"it: the models. {report.sites} sites are enrolled in the run; "
        f"{'all that are available' if report.cohort is None else report.cohort} are asked in a round.</p>\n"
    )
    rows = [
        (f"<td>{one.count:,} ×</td><td>{one.first:,} to {one.last:,}</td>"
         f"<td><code>{escape(json.dumps(one.event, ensure_ascii=False))}</code></td>")
        for one in report.released
    ]  # fmt: skip
    if not rows:
        return text + "<p>Nothing was released.</p>\n"
    more = f"<p>And {len(rows) - _MOST:,} more events, in the JSON.</p>\n" if len(rows) > _MOST else ""
    return text + _table(("how often", "rounds", "event"), rows[:_MOST]) + more


def _recipients(report: PrivacyReport) -> str:
    rows = [
        f"<td>{escape(one.who)}</td><td>{escape(one.what)}</td><td>{escape(one.holds)}</td>"
        for one in report.recipients
    ]
    return _table(("who", "what", "what is claimed"), rows)


def _rests_on(report: PrivacyReport) -> str:
    claim = report.claim
    extra = [text for text in report.unseen.assumptions if text not in claim.assumptions]
    text = f"<p>Calculated by: {escape(claim.accountant)}. Neighbours: {escape(claim.relation.value)}.</p>\n"
    text += _list((report.hidden, *claim.assumptions)) + f"<p>{escape(report.sampling)}</p>\n"
    return text + ("<p>The smaller number rests on this, too:</p>\n" + _list(extra) if extra else "")


def _lost(report: PrivacyReport) -> str:
    if not report.lost:
        return "<p>None: each release gave the model of its round.</p>\n"
    text = (
        "<p>These released a noisy sum, or were about to, and their round was tried again or given up. ε has them in "
        "it.</p>\n"
    )
    rows = [
        f"<td>{one.round:,}</td><td>{one.attempt:,}</td><td>{escape(one.time)}</td><td>{escape(one.why)}</td>"
        for one in report.lost
    ]
    more = f"<p>And {len(rows) - _MOST:,} more, in the JSON.</p>\n" if len(rows) > _MOST else ""
    return text + _table(("round", "attempt", "when", "why"), rows[:_MOST]) + more


def _ledger(report: PrivacyReport) -> str:
    text = f"<p>{report.lines:,} lines, whole. Head: <code>{escape(report.head) or 'none'}</code></p>\n"
    if report.accepted:
        text += '<p class="warn">Lines may be missing. Somebody decided to go on with it as it was:</p>\n'
        text += _list(report.accepted)
    return text


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{title}</h2>\n{inner}</section>\n"


def _list(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>\n"


def _table(headers: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{name}</th>" for name in headers)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n'


def _epsilon(value: float) -> str:
    return up(value) if math.isfinite(value) else "∞"
