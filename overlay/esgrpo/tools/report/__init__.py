"""`esgrpo report DIR`: everything that was measured, on one page; what was not, named.

load.py reads records and says what each one is, runs.py condenses run directories, *tables.py and *figures.py turn
records into tables and pictures, headline.py and sections.py put them in order, page.py writes HTML and Markdown,
trace.py a Chrome trace, files.py puts them in their place. Only records are read (JSON, and JSON lines of run
directories): nothing here measures.
"""

from __future__ import annotations

from pathlib import Path

from esgrpo.errors import EsgrpoError, show
from esgrpo.tools import language

DEFAULT_NAME = "report.html"


def main(directory: str, out: str | None = None, trace: str | None = None) -> int:
    """Writes the page and its Markdown twin, or only the trace; returns the exit code.

    Raises EsgrpoError for a directory without records, for options that cannot be, and without matplotlib.
    """
    from esgrpo.tools.report import load

    root = Path(directory)
    if not root.is_dir():
        raise EsgrpoError("report", f"{root} is no directory", "a directory of result files or a run directory",
                          "nothing was written", "give bench/results, or the run's trainer.default_local_dir")
    _check_options(out, trace)
    if trace is not None:
        from esgrpo.tools.report import trace as chrome

        count, odd = chrome.write(root, Path(trace))
        show(f"esgrpo: {count} trace events in {trace}; open it in https://ui.perfetto.dev or chrome://tracing"
             f"{_named(odd)}")
        return 0
    records = load.records(root)
    if not records:
        raise EsgrpoError("report", f"{root} has no *.json and is no run directory", "at least one record",
                          "nothing was written", "run a benchmark with --results, or give a run directory")
    from esgrpo.tools.report import page, sections

    path = Path(out) if out else root / DEFAULT_NAME
    content = sections.build(records)
    page.write(content, path)
    show(f"esgrpo: {path} and {path.with_suffix('.md').name}: "
         f"{language.counted(len(records), 'record')}, not run: {language.counted(len(content.missing), 'kind')} of "
         f"evidence{_named([record.name for record in content.unknown])}")
    return 0


def _check_options(out: str | None, trace: str | None) -> None:
    """Raises EsgrpoError for what could not be written as it was asked for."""
    if out is not None and trace is not None:
        raise EsgrpoError("report", "--out and --trace", "one of them", "nothing was written",
                          "run it once with each: a trace is no page")
    if out is not None and not out.endswith(".html"):  # Markdown of the same name would overwrite page.md
        raise EsgrpoError("report", repr(out), "FILE.html", "nothing was written", "give another one with --out")
    if trace is not None and not Path(trace).name:
        raise EsgrpoError("report", repr(trace), "FILE.json", "nothing was written", "give another one with --trace")


def _named(odd: list[str]) -> str:
    return f", unknown shape: {', '.join(odd)}" if odd else ""
