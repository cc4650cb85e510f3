"""The fake Hub and its clients, for tests of this room."""

from hub_client import client, hub, new_hub, published, pushed


__all__ = ["client", "hub", "new_hub", "published", "pushed"]
