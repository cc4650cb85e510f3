"""The pair that this code was published with; `specx publish` writes this file anew for each pair."""

PAIR: str | None = None  # id on the Hub; None in a folder, which may be moved and copied
REVISION: str | None = None  # the commit of its models
VERSION: str | None = None  # of hf_specx, with a digest of this code
