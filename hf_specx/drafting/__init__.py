"""Who proposes candidates, and how many."""
