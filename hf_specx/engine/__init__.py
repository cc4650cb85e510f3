"""One call of `generate`: the loop, and what it reports, returns and streams."""
