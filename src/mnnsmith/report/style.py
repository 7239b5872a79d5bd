"""The look of the page: light and dark as the reader's system is, and on paper."""

from __future__ import annotations

# Colours of series, told apart by people who see few colours, against a light and a dark ground.
SERIES = 6
_LIGHT = ("#1f66b0", "#b8520a", "#1c7f56", "#8a3fa8", "#7a6a00", "#b02a56")
_DARK = ("#6fb1f5", "#f2a05f", "#5fcf9c", "#cf95ea", "#d8c455", "#f58bab")
# One hue from "as the original" to "far from it".
HEAT = 7
_HEAT_LIGHT = ("transparent", "#fdf0dd", "#fbdcb4", "#f7bd84", "#ee9457", "#d9632f", "#a83413")
_HEAT_DARK = ("transparent", "#33261a", "#523519", "#77461a", "#a35a1f", "#cf7430", "#f3a063")

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --panel: #f6f7f9; --ink: #1b1e23; --dim: #565d69;
--rule: #d7dbe1; --good: #146c43; --bad: #b3261e; --warn: #8a5a00; --on-heat: #fff; %(light)s }
@media (prefers-color-scheme: dark) { :root { --ground: #101216; --panel: #181b20; --ink: #e7e9ec;
--dim: #a0a7b3; --rule: #30353d; --good: #62cf98; --bad: #ff8a80; --warn: #f0bf5c;
--on-heat: #14100c; %(dark)s } }
* { box-sizing: border-box; }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
margin: 0 auto; max-width: 1080px; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { border-top: 1px solid var(--rule); font-size: 1.15rem; margin: 2.2rem 0 .6rem;
padding-top: 1.2rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; overflow-wrap: anywhere; }
p, figcaption { color: var(--dim); margin: .3rem 0 .7rem; max-width: 48rem; }
figure { margin: .4rem 0 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .93em; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .9rem .25rem 0; text-align: left;
vertical-align: top; }
thead th { color: var(--dim); font-weight: 500; white-space: nowrap; }
tbody th { font-weight: 500; }
td code, li code { overflow-wrap: anywhere; }
code { font: .92em ui-monospace, monospace; }
.verdict { border-radius: .3rem; display: inline-block; font-weight: 600; padding: .05rem .55rem; }
.passed { color: var(--good); } .failed { color: var(--bad); } .skipped { color: var(--dim); }
.error { color: var(--bad); } .warning { color: var(--warn); } .note { color: var(--dim); }
.verdict.passed, .verdict.failed { border: 1.5px solid currentColor; }
.legend { color: var(--dim); display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .3rem 0; }
.key { border-radius: 2px; display: inline-block; height: .75em; margin-right: .4em; width: 1.3em; }
ul.findings { margin: .2rem 0 .8rem; padding-left: 1.1rem; } ul.findings li { margin: .25rem 0; }
svg { display: block; } svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
svg .rule { stroke: var(--rule); } svg .limit { stroke: var(--bad); stroke-dasharray: 5 4; }
svg .line { fill: none; stroke-width: 1.8; } svg .dashed { stroke-dasharray: 3 3; }
.sample { background: var(--panel); border-radius: .4rem; font: 14px/2 ui-monospace, monospace;
overflow-wrap: anywhere; padding: .8rem 1rem; white-space: pre-wrap; }
.sample span { border-radius: 2px; padding: .15em 0; }
.sample .differs { text-decoration: underline; text-decoration-thickness: 2px;
text-underline-offset: 4px; }
.bundles { display: grid; gap: 0 2rem;
grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); }
%(classes)s
@media print { body { font-size: 10.5pt; max-width: none; padding: 0; }
h2 { break-after: avoid; } figure, .sample, tr { break-inside: avoid; }
.scroll { overflow: visible; }
* { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def stylesheet() -> str:
    """The page's CSS."""
    series = "\n".join(
        f".s{i} {{ background: var(--s{i}); fill: var(--s{i}); stroke: var(--s{i}); }}"
        for i in range(SERIES)
    )
    heat = "\n".join(f".h{i} {{ background: var(--h{i}); }}" for i in range(HEAT))
    strong = ", ".join(f".h{i}" for i in range(HEAT - 2, HEAT))
    return _STYLE % {
        "light": _variables(_LIGHT, "s") + _variables(_HEAT_LIGHT, "h"),
        "dark": _variables(_DARK, "s") + _variables(_HEAT_DARK, "h"),
        "classes": f"{series}\n{heat}\n{strong} {{ color: var(--on-heat); }}",
    }


def _variables(colours: tuple[str, ...], name: str) -> str:
    return " ".join(f"--{name}{i}: {colour};" for i, colour in enumerate(colours))
