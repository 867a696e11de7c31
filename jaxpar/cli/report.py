"""``jaxpar report``: one page about a run or several."""

from __future__ import annotations

from pathlib import Path

from jaxpar.cli.arguments import folder_of, parser_of


def run(arguments: list[str]) -> int:
    parser = parser_of("report", "Write an HTML page about run folders.")
    parser.add_argument("runs", nargs="+", type=folder_of, metavar="RUN", help="run folders")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page, with figures in a folder beside it; default: report.html, in the folder of a single run",
    )
    options = parser.parse_args(arguments)

    from jaxpar.report.page import write_report

    print(f"report   {write_report(options.runs, options.output)}")
    return 0
