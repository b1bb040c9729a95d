"""The same figures from the program itself: its trace, its compiled form, one executed step."""
