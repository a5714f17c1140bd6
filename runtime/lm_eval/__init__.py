"""Bundles in lm-evaluation-harness: `python -m runtime.lm_eval --model signpost ...`. Needs the extra `lm-eval`.

`scoring` has the arithmetic and does without lm_eval; `model` has the class that it knows as `signpost`.
"""
