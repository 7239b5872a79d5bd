"""The use of experts as one page of HTML: a heat map of layers by experts, and its numbers.

The page stands alone: no script, nothing from a network, light and dark as the reader's system is.
"""

from __future__ import annotations

import html
import math
from bisect import bisect_right

from mnnsmith.inspection.expert_use import ExpertUse, LayerUse

# Limits between the colours, in multiples of an even share; the first colour is "never chosen".
_STEPS = (0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 4.0)
# One hue, from hardly to strongly against the page's ground: light theme, dark theme.
_LIGHT = ("#f4f5f7", "#e3ecf8", "#c6dbf2", "#a0c4e8", "#74a8dc", "#478bcb", "#266cae", "#124d88",
          "#06305c")  # fmt: skip
_DARK = ("#1a1d22", "#17293d", "#173a5c", "#1b4d7c", "#24639c", "#3a7fbc", "#619fd6", "#93c1ea",
         "#d3e7fb")  # fmt: skip
_CELL_HEIGHT, _LABEL_WIDTH, _MAP_WIDTH = 14, 64, 1024
_TOP = 5

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c1f24; --dim: #5c6370;
--rule: #d9dce1; %(light)s }
@media (prefers-color-scheme: dark) { :root { --ground: #111317; --ink: #e6e8eb; --dim: #9aa1ac;
--rule: #2c3037; %(dark)s } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
margin: 2rem auto; max-width: 1160px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, figcaption { color: var(--dim); max-width: 46rem; } figure { margin: 0; overflow-x: auto; }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--rule); padding: .2rem .8rem .2rem 0; text-align: right; }
th { color: var(--dim); font-weight: 500; } td:last-child, th:last-child { text-align: left; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin: .6rem 0; color: var(--dim); }
.legend i { border: 1px solid var(--rule); display: inline-block; height: .8em;
margin-right: .35em; width: 1.4em; }
%(fills)s
"""


def expert_page(use: ExpertUse) -> str:
    """The page for `use`."""
    name = html.escape(use.model)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Experts of {name}</title>\n<style>{_style()}</style></head><body>\n"
        f"<h1>Which experts are used: {name}</h1>\n<p>{_summary(use)}</p>\n"
        f"<h2>Layers by experts</h2>\n{_legend()}\n{_map(use)}\n"
        f"<h2>Layers</h2>\n{_table(use)}\n</body></html>\n"
    )


def _style() -> str:
    def colours(palette: tuple[str, ...]) -> str:
        return " ".join(f"--c{i}: {colour};" for i, colour in enumerate(palette))

    fills = "\n".join(
        f".c{i} {{ fill: var(--c{i}); background: var(--c{i}); }}" for i in range(len(_LIGHT))
    )
    return _STYLE % {"light": colours(_LIGHT), "dark": colours(_DARK), "fills": fills}


def _summary(use: ExpertUse) -> str:
    return (
        f"{use.tokens} tokens; in each of {len(use.layers)} layers every token uses {use.chosen} "
        f"of {use.experts} experts. On average {use.covering(0.5):.0%} of a layer's experts have "
        f"half of the choices, {use.covering(0.9):.0%} have 90 %, and {use.covering(0.99):.0%} "
        "have 99 %."
    )


def _legend() -> str:
    names = ["never"]
    limits = (0.0, *_STEPS)
    for low, high in zip(limits, (*_STEPS, None), strict=True):
        names.append(f"over {low:g}" if high is None else f"{low:g} to {high:g}")
    items = "".join(f'<span><i class="c{i}"></i>{name}</span>' for i, name in enumerate(names))
    return f'<div class="legend"><span>times an even share:</span>{items}</div>'


def _map(use: ExpertUse) -> str:
    cell = max(3, min(16, _MAP_WIDTH // use.experts))
    width = _LABEL_WIDTH + cell * use.experts
    height = _CELL_HEIGHT * len(use.layers) + 20
    parts = [
        f'<figure><svg role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" aria-label="Share of choices, by layer and expert">'
    ]
    for row, layer in enumerate(use.layers):
        y = row * _CELL_HEIGHT
        parts.append(f'<text x="0" y="{y + 11}">layer {layer.layer}</text>')
        for expert, share in enumerate(layer.shares):
            x = _LABEL_WIDTH + cell * expert
            parts.append(
                f'<rect class="c{_step(share * use.experts)}" x="{x}" y="{y}" width="{cell - 1}" '
                f'height="{_CELL_HEIGHT - 1}"><title>layer {layer.layer}, expert {expert}: '
                f"{layer.counts[expert]} tokens ({layer.counts[expert] / use.tokens:.1%})"
                "</title></rect>"
            )
    bottom = _CELL_HEIGHT * len(use.layers) + 14
    last = _LABEL_WIDTH + cell * use.experts
    parts.append(f'<text x="{_LABEL_WIDTH}" y="{bottom}">expert 0</text>')
    parts.append(f'<text x="{last}" y="{bottom}" text-anchor="end">{use.experts - 1}</text>')
    caption = "<figcaption>Rest on a cell to see its numbers.</figcaption>"
    return "".join(parts) + f"</svg>{caption}</figure>"


def _step(multiple: float) -> int:
    """The colour for a share, given as a multiple of an even one."""
    return 0 if multiple == 0 else 1 + bisect_right(_STEPS, multiple)


def _table(use: ExpertUse) -> str:
    heads = ("layer", "entropy (bits)", "50 %", "90 %", "99 %", "unused", "most chosen")
    rows = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    rows += [_table_row(use, layer) for layer in use.layers]
    note = (
        f"Entropy of an even use: {math.log2(use.experts):.2f} bits. 50, 90, 99 %: experts that "
        "have this part of the choices. Most chosen: expert, and the part of tokens that use it."
    )
    return f"<figure><table>{''.join(rows)}</table></figure><p>{note}</p>"


def _table_row(use: ExpertUse, layer: LayerUse) -> str:
    top = ", ".join(
        f"{expert} ({layer.counts[expert] / use.tokens:.0%})" for expert, _ in layer.top(_TOP)
    )
    cells = (
        layer.layer, f"{layer.entropy_bits:.2f}",
        *(layer.covering(part) for part in (0.5, 0.9, 0.99)), layer.unused, top,
    )  # fmt: skip
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
