"""What gateways that serve one fleet tell each other over Redis. Advice: nothing here is ever in a request's way.

Face: `Journal` (what this replica tells), `Peers` (what the others told, put into the core), `Exchange` (the tasks that
carry messages), `RegistrySource` and `Announcer` (workers that announce themselves), `Shelf` (what outlives the
process). Where it all is: `gateway.store_address`.
"""

from gateway.replicas.exchange import Exchange
from gateway.replicas.journal import Journal
from gateway.replicas.peers import Peers
from gateway.replicas.registry import Announcer, RegistrySource
from gateway.replicas.snapshots import Shelf

__all__ = ["Announcer", "Exchange", "Journal", "Peers", "RegistrySource", "Shelf"]
