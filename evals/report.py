"""Report: JSON lines of `evals.speedup` become Markdown, plots and one page that opens from disk.

    python -m evals.report results/speedup-*.jsonl --out report

It reads what was measured and adds nothing: every number carries the command and the commit it came
from. It runs no model.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evals import marked, plots, results, speedup_table
from evals.runs import KIND, Run, Summary, summarise

FORMATS = ("svg", "png")
PLOTS: dict[str, tuple[str, Callable[[Sequence[Run], Sequence[Summary]], Any]]] = {
    "speedup": ("Speed-up over plain decoding against concurrency", plots.speedup),
    "acceptance": ("Acceptance by draft position", plots.acceptance),
    "latency": ("Latency of a request", plots.latency),
    "stages": ("Timeline of the mean step", plots.stages),
}


def read_runs(paths: Sequence[Path]) -> list[tuple[dict[str, Any], Run]]:
    """Every run with its record; all must share commit, machine and settings, or they cannot be one table."""
    records = [record for path in paths for record in results.read(path) if record["kind"] == KIND]
    found = [(record, Run.from_record(record)) for record in records]
    if not found:
        raise ValueError(f"no {KIND} records in {', '.join(map(str, paths))}")
    for key in ("commit", "machine", "settings"):
        values = [record[key] for record, _ in found]
        if any(value != values[0] for value in values):
            raise ValueError(f"the runs differ in {key}; report them one at a time")
    return found


def markdown(record: dict[str, Any], summaries: Sequence[Summary], images: dict[str, str]) -> str:
    """The report as Markdown; `images` maps a plot's title to its file."""
    parts = ["# Speed-up", provenance(record)]
    for headers, rows in (speedup_table.speed_cells(summaries), speedup_table.latency_cells(summaries)):
        lines = [headers, ["---"] * len(headers), *rows]
        parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in lines))
    parts.append(speedup_table.NOTES)
    parts += [f"## {title}\n\n![{title}]({name})" for title, name in images.items()]
    return "\n\n".join(parts) + "\n"


def into_readme(text: str, record: dict[str, Any], summaries: Sequence[Summary], images: Sequence[str]) -> str:
    """A README whose marked part says what was measured; raises ValueError where it has no such part."""
    headers, rows = speedup_table.speed_cells(summaries)
    lines = ["| " + " | ".join(cells) + " |" for cells in (headers, ["---"] * len(headers), *rows)]
    parts = [provenance(record), "\n".join(lines), *(f"![{Path(image).stem}]({image})" for image in images)]
    return marked.replaced(text, "measured", "\n\n".join(parts))


def provenance(record: dict[str, Any]) -> str:
    """One paragraph: command, commit, versions, machine."""
    machine, versions = record["machine"], record["versions"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} threads"
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"`{record['command']}` at commit {record['commit'] or 'unknown'}, started {record['started']}; {packages}; "
        f"{device}, {machine['memory_gib']} GiB."
    )


def page(record: dict[str, Any], summaries: Sequence[Summary], svgs: dict[str, str]) -> str:
    """The report as one HTML file, plots inside; it fetches nothing."""
    tables = []
    for headers, rows in (speedup_table.speed_cells(summaries), speedup_table.latency_cells(summaries)):
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in headers)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        tables.append(f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")
    figures = [f"<h2>{html.escape(title)}</h2>{svg}" for title, svg in svgs.items()]
    text = [f"<p>{html.escape(provenance(record)).replace('`', '')}</p>", *tables]
    text += [f"<p>{html.escape(speedup_table.NOTES)}</p>", *figures]
    return _PAGE.replace("BODY", "\n".join(text))


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>specdec: speed-up</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left }
svg { max-width: 100%; height: auto }
</style>
<h1>Speed-up</h1>
BODY
</html>
"""


def main(argv: Sequence[str]) -> int:
    """Write report.md, the plots and report.html."""
    parser = argparse.ArgumentParser(prog="python -m evals.report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON lines of evals.speedup")
    parser.add_argument("--out", type=Path, default=Path("report"), help="a directory; it is made")
    parser.add_argument("--readme", type=Path, help="a README whose marked part is written anew")
    args = parser.parse_args(argv)
    try:
        found = read_runs(args.results)
    except (OSError, ValueError) as error:
        print(f"evals.report: {error}", file=sys.stderr)
        return 2
    record, runs = found[0][0], [run for _, run in found]
    summaries = summarise(runs)
    args.out.mkdir(parents=True, exist_ok=True)
    svgs: dict[str, str] = {}
    images: dict[str, str] = {}
    for name, (title, draw) in PLOTS.items():
        figure = draw(runs, summaries)
        for form in FORMATS:
            plots.save(figure, args.out / f"{name}.{form}")
        images[title] = f"{name}.svg"
        svgs[title] = _inline((args.out / f"{name}.svg").read_text(encoding="utf-8"))
    (args.out / "report.md").write_text(markdown(record, summaries, images), encoding="utf-8")
    (args.out / "report.html").write_text(page(record, summaries, svgs), encoding="utf-8")
    if args.readme is not None:
        plot = (args.out / "speedup.svg").resolve().relative_to(args.readme.resolve().parent).as_posix()
        text = into_readme(args.readme.read_text(encoding="utf-8"), record, summaries, [plot])
        args.readme.write_text(text, encoding="utf-8")
    print(f"{args.out / 'report.md'}, {args.out / 'report.html'} and {len(PLOTS)} plots")
    return 0


def _inline(svg: str) -> str:
    return svg[svg.index("<svg") :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
