"""Models: the protocol, its Flax form, and the families that ship."""
