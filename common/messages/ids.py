"""Identifiers as distinct types: a block id and a token id are both ints, and swapping them corrupts silently."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Random 128-bit hex id of one request, made by the gateway; a client's `x-request-id` is only echoed."""

GatewayId = NewType("GatewayId", str)
WorkerId = NewType("WorkerId", str)
"""Name of a worker's seat ("decode-0"); the process in that seat is told apart by its epoch."""

ModelName = NewType("ModelName", str)
Fingerprint = NewType("Fingerprint", str)
"""Hex digest of everything that must be equal before two workers may exchange pages."""

Epoch = NewType("Epoch", int)
"""Random 63-bit incarnation number of a process; compared for equality only."""

PlacementNumber = NewType("PlacementNumber", int)
"""Counts the placements of one request, from 1; numbered by its gateway."""

TryNumber = NewType("TryNumber", int)
"""Counts the prefill tries of one placement, from 1; numbered by its decode worker."""

ChoiceIndex = NewType("ChoiceIndex", int)
"""Number of one of a request's answers to the same prompt (OpenAI's `n`), from 0."""

FIRST_CHOICE = ChoiceIndex(0)

TenantId = NewType("TenantId", str)
"""Whose limits and fair share a request counts against: the id of an API key, never the key itself."""

ANYBODY = TenantId("")
"""The tenant of requests without a key."""

BlockId = NewType("BlockId", int)
Generation = NewType("Generation", int)
"""Changes every time a page's owner lets the page be reused."""

TokenId = NewType("TokenId", int)
EntryId = NewType("EntryId", str)
"""Id of an entry in a Redis stream, e.g. "1700000000000-0"."""
