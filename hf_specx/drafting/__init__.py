"""Who proposes candidates."""
