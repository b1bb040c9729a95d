"""The programs: `python -m experiments.NAME` in a clone; a wheel holds this folder as `jaxdist.programs`."""

import sys

from jaxdist.commands import moved_text
from jaxdist.runtime.signals import use_default_sigint

if sys.argv[:1] == ["-m"]:  # what Python has there while it looks for the program
    use_default_sigint()
    names = [word.removeprefix(f"{__name__}.") for word in sys.orig_argv if word.startswith(f"{__name__}.")]
    if names and (text := moved_text(names[0])):
        print(text, file=sys.stderr)
        sys.exit(2)
