"""Drafts trained for a target: see the README of this folder."""
