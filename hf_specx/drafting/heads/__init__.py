"""Drafts that read the target's hidden states."""
