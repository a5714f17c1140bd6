"""How a benchmark was run, for its JSON."""

import re
import shlex
import sys


def command(module: str) -> str:
    """This process's command line; of a path from the root only the last name, as the rest says where files are kept.

    module: its name in `benchmarks`.
    """
    words = (re.sub(r"(^|=|\s)/(?:[^/\s]+/)*(?=[^/\s])", r"\1", word) for word in sys.argv[1:])
    return shlex.join(["python", "-m", f"benchmarks.{module}", *words])
