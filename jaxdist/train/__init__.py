"""Training: the state, the step on local shards, and the program that holds both."""
