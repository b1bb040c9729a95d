"""The evidence behind the plan: published runs, what was fitted to them, and the errors of what was left out."""
