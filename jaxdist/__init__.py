"""Prove a distributed training run on a laptop, then run it unchanged on a cluster."""
