"""The one place of measurement; `python -m experiments.bench WHICH`, listed in `__main__`."""
