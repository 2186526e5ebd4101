"""Who should be in the fleet: sources that name workers, one list made of them, and the fleet brought to it."""

from gateway.discovery.dns import DnsName, DnsSource
from gateway.discovery.enrolment import Enrolment
from gateway.discovery.kube_objects import KubeTraits, Pods, Slices
from gateway.discovery.kubernetes import ApiServer, KubeQuery, KubernetesSource
from gateway.discovery.roster import CONFIG, Entry, Roster, SourceState
from gateway.discovery.source import Found, Publish, Source

__all__ = [
    "CONFIG",
    "ApiServer",
    "DnsName",
    "DnsSource",
    "Enrolment",
    "Entry",
    "Found",
    "KubeQuery",
    "KubeTraits",
    "KubernetesSource",
    "Pods",
    "Publish",
    "Roster",
    "Slices",
    "Source",
    "SourceState",
]
