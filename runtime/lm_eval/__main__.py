"""`python -m runtime.lm_eval --model signpost --model_args pretrained=M,bundle=B --tasks T`.

It is lm_eval's own command line, with our model class registered: lm_eval looks for models nowhere else.
"""

import sys


def main() -> int:
    """Runs lm_eval on the process's arguments; returns 0, 2 with one line on what is wrong, or 130 after Ctrl-C."""
    from artifacts.errors import SignpostError

    try:
        from lm_eval.__main__ import cli_evaluate

        import runtime.lm_eval.model  # noqa: F401
    except ImportError as error:
        return _failed(f"{error}: pip install 'signpost-kv[lm-eval]'")
    try:
        cli_evaluate()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SignpostError as error:
        return _failed(str(error))
    return 0


def _failed(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
