"""One model fed by rows of unequal length."""
