"""Who should be in the fleet: sources that name workers, one list made of them, and the fleet brought to it."""

from gateway.discovery.dns import DnsName, DnsSource
from gateway.discovery.enrolment import Enrolment
from gateway.discovery.roster import CONFIG, Entry, Roster, SourceState
from gateway.discovery.source import Found, Publish, Source

__all__ = [
    "CONFIG",
    "DnsName",
    "DnsSource",
    "Enrolment",
    "Entry",
    "Found",
    "Publish",
    "Roster",
    "Source",
    "SourceState",
]
