"""Bugs of what stands between HTTP and the answers: long bodies, items of responses, tokens, keys."""

from tests.planted.plant import Plant

LONG = "tests/integration/test_long_bodies.py"
WEIGHT = "tests/unit/test_json_weight.py"
RESPONSES = "tests/integration/test_responses_api.py"

PLANTS = (
    Plant(
        name="heavy-body-read",
        rule="A body of too many values is refused before it is decoded.",
        file="gateway/api/bodies.py",
        text="        check_weight(body)\n",
        replacement="",
        tests=(f"{LONG}::test_a_heavy_body_is_refused_and_delays_nobody",),
    ),
    Plant(
        name="heavy-body-on-the-loop",
        rule="A long body is parsed in a thread.",
        file="gateway/api/bodies.py",
        text="    if len(body) <= INLINE_BYTES:\n",
        replacement="    if len(body) >= 0:\n",
        tests=(f"{LONG}::test_a_heavy_body_is_refused_and_delays_nobody",),
    ),
    Plant(
        name="string-ends-at-escaped-quote",
        rule="What stands inside of a string does not count as values.",
        file="gateway/json_weight.py",
        text="        if (quote - first) % 2 == 0:\n",
        replacement="        if quote >= first:\n",
        tests=(WEIGHT,),
    ),
    Plant(
        name="calls-in-one-item",
        rule="Every call of a response is an item of its own.",
        file="gateway/responses/output.py",
        text="        return isinstance(piece, ToolCallDelta) and piece.index == self._call_index\n",
        replacement="        return isinstance(piece, ToolCallDelta)\n",
        tests=(f"{RESPONSES}::test_calls_and_what_stands_around_them",),
    ),
    Plant(
        name="logprobs-of-markers",
        rule="A message has the logprobs of its own tokens.",
        file="gateway/responses/output.py",
        text="            logprobs = _from_text_on(logprobs, piece.text.encode())\n",
        replacement="            pass\n",
        tests=(f"{RESPONSES}::test_logprobs_are_those_of_the_text",),
    ),
    Plant(
        name="failure-before-its-beginning",
        rule="A response that broke off fails; one that never began has no response to tell of.",
        file="gateway/responses/writer.py",
        text="        if not self._has_begun:\n            return ErrorEvent",
        replacement="        if self._has_begun:\n            return ErrorEvent",
        tests=(
            f"{RESPONSES}::test_an_answer_that_breaks_off",
            f"{RESPONSES}::test_an_answer_that_never_begins_though_its_stream_has",
        ),
    ),
    Plant(
        name="tokenised-without-permit",
        rule="To the limits of a key tokenising is a request.",
        file="gateway/api/tokens.py",
        text="    async with service.admission.reserve(claim):\n",
        replacement="    if claim:\n",
        tests=("tests/integration/test_tokens_api.py::test_to_a_keys_limits_tokenising_is_a_request_without_tokens",),
    ),
    Plant(
        name="malformed-request-repeated",
        rule="Nothing of what is no HTTP is repeated.",
        file="gateway/api/malformed.py",
        text="        elif status < 500:\n",
        replacement="        elif status < 400:\n",
        tests=("tests/integration/test_hostile_http.py",),
    ),
    Plant(
        name="undescribed-route",
        rule="Every route is described.",
        file="gateway/app.py",
        text='    app.router.add_get("/version", show_version)\n',
        replacement='    app.router.add_get("/version", show_version)\n    app.router.add_get("/v2", show_version)\n',
        tests=("tests/integration/test_openapi.py::test_every_route_is_described_and_nothing_else",),
    ),
)
