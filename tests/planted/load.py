"""Bugs under load: who is refused and when, and what slow clients cost."""

from tests.planted.plant import Plant

ORDER = "tests/contract/test_broker_order.py::TestRate"
BRAKE = "tests/unit/test_brake.py"
QUEUE = "tests/integration/test_queue_limits.py"
LAGGING = "tests/unit/test_lagging_streams.py"
LAGGARDS = "tests/unit/test_laggards.py"
OUTBOX = "tests/unit/test_outbox.py"
EVENTS = "tests/unit/test_event_stream.py"
DISCONNECTS = "tests/integration/test_disconnects.py"

PLANTS = (
    Plant(
        name="waits-as-long-as-it-likes",
        rule="Who would wait longer for a worker than anybody may is refused at once.",
        file="common/broker/place.lua",
        text="demand.max_foreseen or math.huge)",
        replacement="math.huge)",
        tests=(f"{ORDER}::test_who_would_wait_too_long_is_refused_at_once",),
    ),
    Plant(
        name="no-margin",
        rule="A wait is foreseen with an error: the last quarter of the longest one is for that.",
        file="common/broker/policy.py",
        text="FORESEEN_PART = 0.75\n",
        replacement="FORESEEN_PART = 1.0\n",
        tests=(f"{ORDER}::test_the_last_quarter_is_for_errors_of_foreseeing",),
    ),
    Plant(
        name="cold-crowd",
        rule="While nobody knows how fast the waiting set empties, as many wait as are served.",
        file="common/broker/place.lua",
        text="  if demand.max_foreseen and not per_ms and num_waiting >= num_seats() and num_seats() > 0 then\n",
        replacement="  if false then\n",
        tests=(f"{ORDER}::test_while_nobody_knows_the_rate_as_many_wait_as_are_served",),
    ),
    Plant(
        name="waited-out",
        rule="A first placement that has waited as long as it may is given up.",
        file="gateway/placing.py",
        text="            if where == Whereabouts.WAITING and self._queue_left_s(stream) <= 0:\n",
        replacement="            if False:\n",
        tests=(f"{QUEUE}::TestLongestWait::test_who_waits_longer_is_sent_away_and_holds_nothing",),
    ),
    Plant(
        name="sent-away-in-the-middle",
        rule="Nobody who was served before is sent away for waiting too long.",
        file="gateway/placing.py",
        text="        if self._max_queue_s is None or stream.placement > 1:\n",
        replacement="        if self._max_queue_s is None:\n",
        tests=(f"{QUEUE}::TestLongestWait::test_whoever_was_served_before_is_not_sent_away",),
    ),
    Plant(
        name="asks-every-time",
        rule="The like of a refused request is refused without asking Redis.",
        file="gateway/serving.py",
        text="        service.brake.check(flow, visit.limit_s)\n",
        replacement="",
        tests=(f"{QUEUE}::test_the_like_of_a_refused_one_is_refused_without_asking",),
    ),
    Plant(
        name="refused-for-another",
        rule="Only who has no more time than the refused one is refused like it.",
        file="gateway/brake.py",
        text="        elif _endless(limit_s) <= refusal.limit_s:\n",
        replacement="        else:\n",
        tests=(f"{BRAKE}::test_whoever_has_more_time_is_asked_for",),
    ),
    Plant(
        name="all-ask-together",
        rule="When a refusal has become old one request asks again, not all.",
        file="gateway/brake.py",
        text="                self._refusals[flow] = replace(refusal, asks_s=refusal.forgotten_s)\n",
        replacement="",
        tests=(f"{BRAKE}::test_then_one_asks_and_the_others_a_moment_later",),
    ),
    Plant(
        name="all-in-one-piece",
        rule="What a client has not read is read in portions.",
        file="gateway/choice.py",
        text="        ids = tuple(self.shown[first : first + MAX_READ])\n",
        replacement="        ids = tuple(self.shown[first:])\n",
        tests=(f"{LAGGING}::test_it_is_read_in_portions",),
    ),
    Plant(
        name="logprobs-of-others",
        rule="Logprobs go with their tokens, also in portions.",
        file="gateway/logprob_buffer.py",
        text="        del self._top_ids[:num_alternatives], self._top_logprobs[:num_alternatives]\n",
        replacement="",
        tests=(f"{LAGGING}::test_logprobs_go_with_their_tokens",),
    ),
    Plant(
        name="items-are-counted",
        rule="What is made ahead for a client is bounded in bytes.",
        file="gateway/outbox.py",
        text="        self._load += 1 if self._weigh is None else self._weigh(item)\n",
        replacement="        self._load += 1\n",
        tests=(f"{OUTBOX}::test_what_is_made_ahead_is_bounded_by_its_size",),
    ),
    Plant(
        name="slow-is-gone",
        rule="A client that takes bytes, however slowly, is not dropped.",
        file="gateway/sse.py",
        text="Patience(write_timeout_s / 2, self._has_taken_some)",
        replacement="Patience(write_timeout_s)",
        tests=(f"{DISCONNECTS}::test_b107_who_reads_slowly_and_steadily_is_not_dropped",),
    ),
    Plant(
        name="stalled-for-ever",
        rule="A client that takes no bytes is dropped.",
        file="gateway/sse.py",
        text="        return before is None or self._num_waiting < before\n",
        replacement="        return True\n",
        tests=(f"{EVENTS}::test_a_client_that_takes_bytes_is_not_dropped_and_one_that_takes_none_is",),
    ),
    Plant(
        name="laggards-without-end",
        rule="What waits for slow clients is bounded over all of them.",
        file="gateway/laggards.py",
        text="            if num_bytes <= self._max_bytes:\n",
        replacement="            if True:\n",
        tests=(f"{LAGGARDS}::test_the_furthest_behind_is_ended_and_the_others_lose_nothing",),
    ),
)
