"""From one number to a format for every layer: `python -m calib budget=2.5bits@32K`.

What a format damages is measured on the model (`damage`), for keys and values of each layer by themselves; which
formats together cost least within the budget is an integer program (`solve`). What was measured and fitted is kept
(`table`), so another budget needs no model.
"""
