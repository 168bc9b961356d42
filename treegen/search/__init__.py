"""The search behind `auto`: its space, its costs without plans, its bounds."""
