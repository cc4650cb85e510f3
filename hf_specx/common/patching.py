"""What one thread replaces for the length of a forward, while other threads find what was there before."""

import contextlib
import threading
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch


LOCK = threading.Lock()


class PerThread:
    """Stands for a function or a tuple: the threads in `mine` get their own, all others the usual one.

    Args:
        usual: what was found before.
        had: whether the place itself had it, so that it has to be put back.

    Attributes:
        traced: what torch finds when it compiles, which can ask for no thread.
    """

    def __init__(self, usual: Any, had: bool):
        self.__wrapped__, self.had = usual, had  # `inspect.signature` looks for the first by this name
        self.mine: dict[int, Any] = {}
        self.traced = usual

    def _meant(self) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.traced
        return self.mine.get(threading.get_ident(), self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._meant()(*args, **kwargs)

    def __getitem__(self, index: int) -> Any:
        return self._meant()[index]


def usually(found: Any) -> Any:
    """What a thread that replaces nothing gets of what was found in a place."""
    return found.__wrapped__ if isinstance(found, PerThread) else found


@contextlib.contextmanager
def in_this_thread(
    place: MutableMapping[str, Any], name: str, usual: Any, mine: Any, traced: Any = None
) -> Iterator[None]:
    """Let this thread alone find `mine` in a place that all threads look at.

    Args:
        place, name: where they look first, as in `vars(module), "forward"`.
        usual: what they find, there or elsewhere; see `usually`.
        mine: a function or a tuple, as `usual` is.
        traced: what torch finds when it compiles meanwhile; the usual one if None.
    """
    thread = threading.get_ident()
    with LOCK:
        found = place.get(name)
        shared = found if isinstance(found, PerThread) else PerThread(usual, name in place)
        earlier = shared.mine.get(thread)
        shared.mine[thread] = mine
        shared.traced = shared.traced if traced is None else traced
        place[name] = shared
    try:
        yield
    finally:
        with LOCK:
            shared.mine[thread] = earlier
            if earlier is None:
                del shared.mine[thread]
            if not shared.mine and place.get(name) is shared:
                place[name] = shared.__wrapped__
                if not shared.had:
                    del place[name]
