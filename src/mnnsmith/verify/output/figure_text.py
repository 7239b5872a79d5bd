"""Figures as people read them: the same words and digits in the terminal, Markdown and the page."""

from __future__ import annotations

from mnnsmith.verify.results import Interval, StatisticalFigures, VisionFigures


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def percent(value: float, digits: int = 1) -> str:
    """A part of one, as 91.2 %."""
    return f"{100 * value:.{digits}f} %"


def statistical_rows(figures: StatisticalFigures) -> list[tuple[str, str, str]]:
    """Each main figure: what it is, its value, and its 95 % interval where it has one."""
    worse = figures.perplexity_increase
    tails = (figures.kl_median, figures.kl_p99, figures.kl_max)
    return [
        ("KL, nats", number(figures.kl.mean), _numbers(figures.kl)),
        ("KL: median, 99 %, largest", ", ".join(map(number, tails)), ""),
        ("same best token", percent(figures.top1.mean), _percents(figures.top1)),
        ("best token among five", percent(figures.top5.mean), _percents(figures.top5)),
        ("perplexity", f"{figures.perplexity:.4g}", ""),
        ("perplexity of the original", f"{figures.reference_perplexity:.4g}", ""),
        ("perplexity increase", percent(worse.mean, 2), _percents(worse, 2)),
        ("same greedy answers", _greedy(figures), ""),
    ]


def vision_rows(figures: VisionFigures) -> list[tuple[str, str, str]]:
    """As `statistical_rows`, of pictures and what comes after them."""
    exact = max((value.error for value in figures.exact), default=0.0)
    shipped = max((value.error for value in figures.shipped), default=None)
    rows = [
        ("pictures, prompts; differ", f"{figures.pictures}; {figures.pictures_different}", ""),
        ("vision: largest error, exact", number(exact), ""),
        ("logits after pictures: KL, exact", number(figures.max_kl), ""),
    ]
    if shipped is not None:
        rows.append(("vision: largest error, shipped", number(shipped), ""))
    if figures.kl is not None and figures.top1 is not None:
        rows += [
            ("KL after pictures, nats", number(figures.kl.mean), _numbers(figures.kl)),
            ("same best token after pictures", percent(figures.top1.mean),
             _percents(figures.top1)),
        ]  # fmt: skip
    return rows


def _greedy(figures: StatisticalFigures) -> str:
    left = [place for place in figures.greedy if place is not None]
    count = len(figures.greedy)
    text = f"{count - len(left)} of {count}, for {figures.greedy_tokens} tokens"
    if not left:
        return text
    others = "the other leaves" if len(left) == 1 else "the others leave"
    return f"{text}; {others} at token {', '.join(map(str, left))}"


def _numbers(found: Interval) -> str:
    return f"{number(found.low)} to {number(found.high)}"


def _percents(found: Interval, digits: int = 1) -> str:
    return f"{percent(found.low, digits)} to {percent(found.high, digits)}"
