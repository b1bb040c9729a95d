"""State on disk: written, checked, read back on any mesh."""
