"""`python -m calib.report BUNDLE`: what a bundle learned and what it costs, as one page and pictures."""
