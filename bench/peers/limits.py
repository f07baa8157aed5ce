"""The machine's own ceilings."""
from . import Context, Peer
class Limits(Peer):
    name = "raw"
    def available(self, context): return "later"
    def covers(self, case): return False
