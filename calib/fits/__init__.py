"""Fits, one file per part: from observed pages to the tensors that the part declares for the bundle.

A fit is an object with `gradients` (whether it needs them), `observe(pages, outliers, gradient)` and `result()`.
"""
