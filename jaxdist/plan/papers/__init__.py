"""The papers' own models: their closed forms, and published runs that our predictions are held against."""
