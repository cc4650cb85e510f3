"""The command line as `python -m hf_specx`."""

from hf_specx.cli.app import main


if __name__ == "__main__":
    main()
