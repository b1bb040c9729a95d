"""The programs: `python -m experiments.NAME` in a clone; a wheel holds this folder as `jaxdist.programs`."""

import sys

from jaxdist.runtime.signals import die_of_interrupts

if sys.argv[:1] == ["-m"]:  # what Python has there while it looks for the program
    die_of_interrupts()
