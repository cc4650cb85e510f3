"""The command line `specx`."""
