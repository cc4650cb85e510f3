"""`specx check`: whether speculation changes what a target says."""
