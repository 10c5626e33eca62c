"""Every Redis key of Tandem. All keys of one model share a hash tag, so that scripts stay atomic on a Redis Cluster.

`tandem:{<model>}:` +  type    holds                                          written by           ends after
---------------------  ------  ---------------------------------------------  -------------------  --------------------
workers                hash    worker -> what placement looks at (packed)     beat, leave          1 h without a beat
records                hash    worker -> WorkerRecord                         beat, leave          1 h without a beat
loads                  hash    worker -> WorkerLoad                           beat, leave          1 h without a beat
card                   string  ModelCard                                      publish_card, beat   card TTL after a beat
gateways               zset    gateway -> end of its lease (ms)               beat_gateway, place  1 h without a beat
pulse                  hash    last beat of anybody, end of the grace time,   beats, place, drain  1 h without a beat
                               how fast the waiting set empties
waiting                zset    rank, tenant, arrival, cost, request           place, drain         1 h without a write
flows                  zset    rank, tenant with waiting jobs -> its turn     place, drain         1 h without a write
shares                 hash    tenant -> tokens that it was served            place, drain, gate-  1 h without a write
                                                                              way's beat
backlog                hash    waiting tokens of each flow and rank           place, drain         1 h without a write
parked                 hash    request -> Job of a waiting request            place, drain         1 h without a write
places                 hash    request -> its placement and where (packed)    place, drain         record TTL, by `ages`
ages                   zset    request -> last change of its place (ms)       place, drain         record TTL
jobs:<worker>:<epoch>  stream  Jobs of one incarnation of a worker            place, drain         stream TTL of a beat
held:<worker>:<epoch>  hash    entry of that stream -> room it reserves       place, drain         as its stream
sum:<worker>:<epoch>   string  what all of these reserve, and how many        place, drain, beat   as its stream
prefixes:<w..>:<e..>   set     hashes of prefixes in that worker's cache      tell_prefixes        as its stream
prefill:<fingerprint>  stream  PrefillTasks, group `prefill`                  publish, claim       task TTL of a publish

`tandem:models`        zset    model -> last beat of any of its workers (ms)  beat                 1 h without a beat
`tandem:notices`       stream  CancelNotices, read by every gateway           post                 notice TTL of a post

`tandem:{tenant:<id>}:` holds what one API key uses, its scripts are atomic as well:
requests, tokens       hash    step of the window -> what was charged in it   reserve, settle,     2 windows
permits                hash    request -> its choices and charge (packed)       release            10 leases
leases                 zset    one per choice of a permit -> its end (ms)     reserve, renew       10 leases
over                   zset    request -> end of what may arrive late (ms)    release              a lease

`tandem:{api-keys}:` holds who there is, if the keys are kept in Redis:
records                hash    id -> ApiKey                                   `tandem keys`        never
version                string  changes with every write                       `tandem keys`        never

"drain" moves waiting jobs to workers; it is part of the scripts of place, withdraw and every decode worker's beat.
"""

from functools import lru_cache
from typing import Final
from urllib.parse import quote

from common.messages.ids import Epoch, Fingerprint, ModelName, TenantId, WorkerId

MODELS: Final = "tandem:models"
NOTICES: Final = "tandem:notices"
API_KEYS: Final = ("tandem:{api-keys}:records", "tandem:{api-keys}:version")


@lru_cache(maxsize=1 << 12)  # a placement asks for the same few names again and again, 2 us each
def escape(name: str) -> str:
    """Return `name` without braces, colons, blanks and control characters; different names stay different."""
    return quote(name, safe="/@+", errors="surrogatepass")


class Keys:
    """The keys of one model."""

    def __init__(self, model: ModelName) -> None:
        assert model, "an empty hash tag would spread the keys over the cluster"
        self._prefix = f"tandem:{{{escape(model)}}}:"
        self.workers: Final = self._prefix + "workers"
        self.records: Final = self._prefix + "records"
        self.loads: Final = self._prefix + "loads"
        self.card: Final = self._prefix + "card"
        self.gateways: Final = self._prefix + "gateways"
        self.pulse: Final = self._prefix + "pulse"
        self.waiting: Final = self._prefix + "waiting"
        self.parked: Final = self._prefix + "parked"
        self.places: Final = self._prefix + "places"
        self.ages: Final = self._prefix + "ages"
        self.flows: Final = self._prefix + "flows"
        self.shares: Final = self._prefix + "shares"
        self.backlog: Final = self._prefix + "backlog"
        moving = (self.workers, self.gateways, self.waiting, self.parked, self.places, self.ages, self.pulse)
        self.queue: Final[tuple[str, ...]] = (*moving, self.flows, self.shares, self.backlog)
        """The fixed keys of every script that moves jobs, in the order that `queue.lua` expects."""

    @property
    def registry(self) -> tuple[str, ...]:
        """The keys of what workers say about themselves."""
        return (self.workers, self.records, self.loads)

    def lane(self, worker: WorkerId, epoch: Epoch) -> tuple[str, str, str, str]:
        """The stream of one incarnation of a worker, the reservations of its entries, what its cache has, and the sum
        of the reservations."""
        return self.jobs(worker, epoch), self.held(worker, epoch), self.prefixes(worker, epoch), self.sum(worker, epoch)

    def jobs(self, worker: WorkerId, epoch: Epoch) -> str:
        """Stream of jobs for one incarnation of a worker."""
        return f"{self._prefix}jobs:{escape(worker)}:{epoch}"

    def held(self, worker: WorkerId, epoch: Epoch) -> str:
        """Room reserved by the entries of that stream."""
        return f"{self._prefix}held:{escape(worker)}:{epoch}"

    def sum(self, worker: WorkerId, epoch: Epoch) -> str:
        """What these entries reserve together."""
        return f"{self._prefix}sum:{escape(worker)}:{epoch}"

    def prefixes(self, worker: WorkerId, epoch: Epoch) -> str:
        """Hashes of the prefixes that one incarnation of a worker has in its cache."""
        return f"{self._prefix}prefixes:{escape(worker)}:{epoch}"

    def prefill(self, fingerprint: Fingerprint) -> str:
        """Stream of prefill tasks that any worker of this fingerprint may take."""
        return f"{self._prefix}prefill:{escape(fingerprint)}"


def tenant_keys(tenant: TenantId) -> tuple[str, ...]:
    """Return the keys of what a tenant uses, in the order that `limits.lua` expects."""
    assert tenant, "without a key nothing is counted"
    prefix = f"tandem:{{tenant:{escape(tenant)}}}:"
    return tuple(prefix + name for name in ("requests", "tokens", "permits", "leases", "over"))
