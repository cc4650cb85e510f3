"""Keys, values and states, written in place and rolled back."""
