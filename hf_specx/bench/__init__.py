"""Speed: the bench, traces of single texts, and which draft to take."""
