"""A command line that refuses arguments as the rest of us refuses things: one line of five parts, exit code 2."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from esgrpo.errors import EsgrpoError, say

# what argparse and the commands say -> what was found, what was wanted; the first that fits
_SAID = ((r"the following arguments are required: (.*)", r"no \1", r"\1, as --help says"),
         (r"(.*invalid choice: .*) \(choose from (.*)\)", r"\1", r"one of \2"),
         (r"(.*): invalid int value: (.*)", r"\1: \2", "a whole number"),
         (r"(.*): invalid float value: (.*)", r"\1: \2", "a number"),
         (r"(.*?)[:;,]? wanted:? (.*)", r"\1", r"\2"),
         (r"(.*?)[:;,] known(?: are|:) (.*)", r"\1", r"one of \2"),
         (r"(.*)", r"\1", "arguments as --help lists them"))


class Parser(argparse.ArgumentParser):
    """argparse prints its usage first, of up to 17 lines."""

    def error(self, message: str) -> NoReturn:
        who = re.sub(r"^(python -m|esgrpo) ", "", self.prog)
        text = message.removeprefix("argument ").replace("|", ",")
        hit, found, wanted = next((hit, found, wanted) for pattern, found, wanted in _SAID
                                  if (hit := re.fullmatch(pattern, text, re.DOTALL)))
        say(EsgrpoError("command line" if who == "esgrpo" else who, hit.expand(found), hit.expand(wanted),
                        "nothing was started", f"see {self.prog} --help"))
        self.exit(2)
