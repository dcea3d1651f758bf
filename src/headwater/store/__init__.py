"""The Store alone: put, get, exists, remove for batches of objects in the nodes' memory. See `store.client`."""

from headwater.store.client import Store, View
from headwater.store.results import GetResult, Outcome, PutResult

__all__ = ["GetResult", "Outcome", "PutResult", "Store", "View"]
