"""What gateways tell each other."""

import msgspec

from common.messages.ids import ANYBODY, RequestId, TenantId


class CancelNotice(msgspec.Struct, frozen=True, tag="cancel_notice", tag_field="kind"):
    """Somebody wants a request ended, at whichever gateway it is; `is_done`: the gateway that had it has ended it.

    Only a request of `tenant` is meant.
    """

    request: RequestId
    is_done: bool = False
    tenant: TenantId = ANYBODY
