"""The programs: `python -m experiments.NAME` in a clone; a wheel holds this folder as `jaxdist.programs`."""
