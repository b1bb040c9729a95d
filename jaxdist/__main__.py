"""`python -m jaxdist`: the command `jaxdist` where its script is not on the path."""

import sys

from jaxdist.console import main

if __name__ == "__main__":
    sys.exit(main())
