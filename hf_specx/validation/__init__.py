"""What is refused before any forward, with the value and the remedy."""
