"""The programs: `python -m experiments.NAME` in a clone; a wheel holds this folder as `jaxdist.programs`."""

import sys

from jaxdist.runtime.signals import use_default_sigint

if sys.argv[:1] == ["-m"]:  # what Python has there while it looks for the program
    use_default_sigint()
