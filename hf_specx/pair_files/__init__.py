"""Reading a draft-target pair from a folder or the Hub, believing nothing in its files."""
