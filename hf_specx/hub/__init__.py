"""A pair written down: folders, cards, repositories, and settings for other servers."""
