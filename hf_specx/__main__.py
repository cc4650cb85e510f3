"""The command line as `python -m hf_specx`."""

from hf_specx.cli.app import main


main()
