"""What gateways that serve one fleet tell each other over Redis. Advice: nothing here is ever in a request's way.

Face: `Journal` (what this replica tells), `Peers` (what the others told, put into the core), `Exchange` (the tasks that
carry messages), `StoreAddress` (where the store is).
"""

from gateway.replicas.address import StoreAddress
from gateway.replicas.exchange import Exchange
from gateway.replicas.journal import Journal
from gateway.replicas.peers import Peers

__all__ = ["Exchange", "Journal", "Peers", "StoreAddress"]
