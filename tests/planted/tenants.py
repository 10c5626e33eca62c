"""Bugs of keys and of tenants' limits: who gets in, and what becomes of what a request held."""

from tests.planted.plant import Plant

LIMITS = "tests/contract/test_broker_limits.py"
KEYS = "tests/unit/test_api_keys.py"
ADMISSION = "tests/unit/test_tenant_admission.py"
AUTHENTICATION = "tests/integration/test_authentication.py"
TENANTS = "tests/integration/test_tenant_limits.py"

PLANTS = (
    Plant(
        name="refusal-costs",
        rule="A request that one limit refuses is charged to none.",
        file="common/broker/reserve_permit.lua",
        text="elseif max_concurrent and redis.call('ZCARD', LEASES) + choices > max_concurrent then\n",
        replacement="elseif max_concurrent and redis.call('ZCARD', LEASES) + choices > max_concurrent then\n"
        "  charge(requests, choices)\n",
        tests=(f"{LIMITS}::TestRequests::test_b106_a_refusal_by_another_limit_costs_nothing",),
    ),
    Plant(
        name="late-reservation-holds",
        rule="A reservation that arrives after its release holds nothing.",
        file="common/broker/reserve_permit.lua",
        text="if is_over(REQUEST) then\n",
        replacement="if false then\n",
        tests=(f"{LIMITS}::TestConcurrency::test_b104_a_reservation_that_arrives_after_its_release_holds_nothing",),
    ),
    Plant(
        name="late-renewal-holds",
        rule="A renewal that arrives after the release holds nothing.",
        file="common/broker/renew_permits.lua",
        text="  if not is_over(request) then\n",
        replacement="  if true then\n",
        tests=(f"{LIMITS}::TestConcurrency::test_b104_a_renewal_that_arrives_after_its_release_holds_nothing",),
    ),
    Plant(
        name="permit-outlives-gateway",
        rule="What a killed gateway held is free when its leases end.",
        file="common/broker/limits.lua",
        text="    redis.call('ZREM', LEASES, ended)\n",
        replacement="",
        tests=(f"{LIMITS}::TestConcurrency::test_b104_what_a_killed_gateway_held_is_free_when_its_leases_end",),
    ),
    Plant(
        name="permit-ended-by-outage",
        rule="No permit ends because Redis was away.",
        file="common/broker/limits.lua",
        text="  if IS_GRACE then\n    return\n  end\n",
        replacement="",
        tests=(f"{TENANTS}::test_leases_that_end_because_redis_was_frozen_go_on",),
    ),
    Plant(
        name="choices-count-once",
        rule="A request for n choices counts as n.",
        file="common/broker/limits.lua",
        text="  for choice = 0, permit.choices - 1 do\n    redis.call('ZADD'",
        replacement="  for choice = 0, 0 do\n    redis.call('ZADD'",
        tests=(f"{LIMITS}::TestConcurrency::test_n_choices_count_as_n",),
    ),
    Plant(
        name="lost-reply-leaks",
        rule="A place whose reply was lost, or whose client left meanwhile, is given back.",
        file="gateway/tenant_permits.py",
        text="            self._give_back(tenant, request, None)\n            raise\n",
        replacement="            raise\n",
        tests=(
            f"{ADMISSION}::test_b104_a_place_whose_reply_was_lost_is_given_back",
            f"{ADMISSION}::test_b104_a_client_that_leaves_while_redis_answers_holds_nothing",
        ),
    ),
    Plant(
        name="refused-and-renewed",
        rule="Only what was granted is renewed: a renewal makes a permit of whatever it names.",
        file="gateway/tenant_permits.py",
        text="        if verdict.refusal is None:",
        replacement="        if True:",
        tests=(f"{ADMISSION}::test_b104_a_renewal_between_a_refusal_and_its_reply_holds_nothing",),
    ),
    Plant(
        name="unserved-pays",
        rule="Who was not served is charged nothing.",
        file="gateway/metering.py",
        text="        num_used = None if is_unserved else ",
        replacement="        num_used = ",
        tests=(f"{ADMISSION}::TestCharges::test_b106_who_was_not_served_is_charged_nothing",),
    ),
    Plant(
        name="revoked-key-lives-on",
        rule="Keys that were not read lately let nobody in.",
        file="gateway/api_keys.py",
        text="        if self._clock() - self._read_at > MAX_AGE_S:\n",
        replacement="        if self._version is None:\n",
        tests=(
            f"{KEYS}::test_b139_a_revoked_key_works_for_two_seconds_at_most",
            f"{KEYS}::test_keys_that_cannot_be_read_for_long_let_nobody_in",
        ),
    ),
    Plant(
        name="any-of-two-keys",
        rule="A request with two Authorization headers has none.",
        file="gateway/api_keys.py",
        text="    if len(sent) > 1:\n",
        replacement="    if len(sent) > 2:\n",
        tests=(f"{KEYS}::test_b139_anything_else_is_nobody",),
    ),
    Plant(
        name="unknown-routes-open",
        rule="A path without a route asks for a key like any other.",
        file="gateway/api/authenticating.py",
        text="        return False\n",
        replacement="        return True\n",
        tests=(f"{AUTHENTICATION}::test_b139_no_spelling_of_a_path_is_a_way_around",),
    ),
    Plant(
        name="cancels-for-anybody",
        rule="A tenant ends its own requests alone.",
        file="gateway/dispatch.py",
        text="        own = [part for part in parts if part.request.tenant == tenant]\n",
        replacement="        own = parts\n",
        tests=("tests/integration/test_chosen_workers.py::TestCancelById::test_b139_a_tenant_ends_its_own_alone",),
    ),
)
