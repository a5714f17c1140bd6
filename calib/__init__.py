"""Offline calibration: `python -m calib`. Needs transformers, scikit-learn, hydra (extra `calib`)."""
