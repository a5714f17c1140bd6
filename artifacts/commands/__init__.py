"""The commands of `python -m artifacts`, one file each: `add_arguments` says what it takes, `run` does it.

`run` gives its result, which `--json` prints, and the exit code; `render` shows the result to people.
"""
