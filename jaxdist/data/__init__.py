"""What a run trains on, and in which order."""
