"""A draft-target pair as one object: loaded, placed, used on many prompts."""
