"""The style sheet of the page: light and dark, screens and paper."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_asgd.report.picture_style import DARK, PAPER

_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI",
Roboto, "Noto Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 66rem; margin: 0 auto; padding: 2.2rem 1.1rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.25; font-weight: 650; margin: 0 0 .35rem; overflow-wrap: anywhere; }
h1 span { white-space: nowrap; } h2 { font-size: 1.2rem; font-weight: 650; margin: 2.8rem 0 .5rem; padding-top: .9rem;
border-top: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 46rem; } ul { margin: .3rem 0; padding-left: 1.2rem; max-width: 46rem; }
li { margin: .3rem 0; } .soft, figcaption { color: var(--soft); }
.end { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; border: 1px solid; font-size: .9rem; }
.good { color: var(--green); } .bad { color: var(--red); } .open { color: var(--soft); }
.error { color: var(--red); white-space: pre-wrap; overflow-wrap: anywhere; }
dl { margin: 1.2rem 0; } dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: .9rem 2.3rem; }
.facts dd { font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.about { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: .7rem 1.6rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr));
gap: 1.6rem 2rem; align-items: start; margin: .6rem 0 1.6rem; }
figure { margin: 0; } figcaption { font-size: .88rem; line-height: 1.45; }
h3 { margin: 0; font-size: 1rem; font-weight: 600; overflow-wrap: anywhere; }
figure svg { display: block; width: 100%; height: auto; margin: .4rem 0; overflow: visible; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.wide { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .36rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; line-height: 1.3; white-space: pre; }
.workers td:nth-child(2), .workers th:nth-child(2), .workers td:nth-child(3), .workers th:nth-child(3),
.settings td, .settings th { text-align: left; }
.all tbody tr:last-child { font-weight: 600; } .settings td { white-space: normal; overflow-wrap: anywhere; }
.settings td:first-child { white-space: nowrap; }
.events { list-style: none; padding: 0; max-width: none; } .events li { margin: .7rem 0; }
.mark { display: inline-block; min-width: 1.5rem; padding: 0 .35rem; border-radius: .7rem; border: 1px solid;
text-align: center; font-size: .8rem; font-weight: 650; margin-right: .5rem; }
.what { overflow-wrap: anywhere; }
pre { font-size: .78rem; line-height: 1.4; max-height: 16rem; overflow: auto; margin: .4rem 0 0; padding: .6rem .8rem;
background: var(--box); border-radius: .4rem; }
@media (max-width: 34rem) { main { padding-top: 1.2rem; } h1 { font-size: 1.4rem; } .facts { gap: .7rem 1.6rem; }
.facts dd { font-size: 1.15rem; } }
@media print { html { font-size: 9.5pt; } body { background: #fff; } main { max-width: none; padding: 0; }
h2 { break-after: avoid; margin-top: 1.4rem; } figure, tr, li, .facts > div { break-inside: avoid; }
.pictures { grid-template-columns: 1fr 1fr; gap: 1rem; } .wide { overflow: visible; }
table { font-size: 7.5pt; } thead th { white-space: pre-line; } th, td { padding: .2rem .3rem; }
pre { max-height: none; white-space: pre-wrap; overflow-wrap: anywhere; } @page { margin: 14mm; } }
"""


def page_style() -> str:
    """Variables for the colours of both themes, and the rules. What is printed is light."""
    light = {**PAPER, "page": "#fcfcfb", "box": "#f2f4f6", "green": "#187a41"}
    dark = {**DARK, "page": "#15181d", "box": "#1e232a"}
    schemes = f":root {{ color-scheme: light; {_variables(light)} }}"
    schemes += (
        f"\n@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {_variables(dark)} }} }}"
    )
    return schemes + _RULES


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())
