"""Read a draft-target pair from a folder or the Hub, trusting nothing in its files."""
