"""How many candidates each row and round gets."""
