"""Prove a distributed training run on a laptop, then run it unchanged on a cluster."""

from jaxdist.versions import __version__ as __version__
