"""The front page's table of gains, computed from the records, or its figure.

usage: python -m bench.gains [--figure docs/training.png]
"""

from __future__ import annotations

import sys

from bench.common import console
from bench.common.gains import ENGLISH, draw, table


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.gains", __doc__.partition("\n")[0])
    parser.add_argument("--figure", type=console.output_file, help="draw it there, as PNG; else the table is printed")
    options = parser.parse_args(argv)
    if options.figure and options.figure.suffix != ".png":
        parser.error(f"--figure {options.figure}: wanted a name that ends in .png")
    if options.figure:
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(options.figure)
    else:
        for row in table(ENGLISH):
            print("  ".join(row))
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
