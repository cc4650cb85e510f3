"""Where the pair is whose `custom_generate` folder this is; `specx publish` writes another file in its place."""

PAIR: str | None = None  # id on the Hub, or a folder
REVISION: str | None = None  # the commit of its models
