"""Bugs of the way of tokens past sleeping tasks, to the client and to Redis."""

from tests.planted.plant import Plant

TAPS = "tests/unit/test_taps.py"
OUTBOX = "tests/unit/test_outbox.py"
EVENTS = "tests/unit/test_event_stream.py"
FAULTS = "tests/integration/test_redis_faults.py"
PIPELINE = "tests/unit/test_pipeline.py"

PLANTS = (
    Plant(
        name="tapped-out-of-order",
        rule="No token passes a reader that has not got what came before it.",
        file="gateway/streams.py",
        text="            if self._is_read and tap is not None and tap.is_open:\n",
        replacement="            if tap is not None and tap.is_open:\n",
        tests=(f"{TAPS}::test_nothing_is_tapped_before_the_reader_has_what_came_before",),
    ),
    Plant(
        name="tap-of-a-full-sink",
        rule="A client that is behind is given nothing past its reader, who waits for it.",
        file="gateway/answer.py",
        text="        return self.has_begun and not self._sink.is_full\n",
        replacement="        return self.has_begun\n",
        tests=(f"{TAPS}::test_a_full_sink_closes_the_tap",),
    ),
    Plant(
        name="tapped-end-unnoticed",
        rule="An answer that ends by what its tap took is over.",
        file="gateway/answer.py",
        text="        if not self._answers.num_open:  # wakes the reader\n",
        replacement="        if False:\n",
        tests=(f"{TAPS}::test_an_answer_that_ends_in_its_tap_is_over",),
    ),
    Plant(
        name="last-item-offered",
        rule="The last item of an answer is brought by whoever waits for its end.",
        file="gateway/outbox.py",
        text="        if self._offer is None or is_last:\n",
        replacement="        if self._offer is None:\n",
        tests=(f"{OUTBOX}::test_the_last_item_is_taken_by_the_consumer_with_what_is_ready_before_it",),
    ),
    Plant(
        name="no-room-behind-the-offer",
        rule="A producer that waits for room goes on when its items have passed the consumer.",
        file="gateway/outbox.py",
        text="        if self._room is not None and not self._room.done():\n            self._room.set_result(None)\n",
        replacement="",
        tests=(f"{OUTBOX}::test_a_producer_gets_room_when_its_items_pass_the_consumer",),
    ),
    Plant(
        name="lagging-client-flooded",
        rule="A client that lags is written to by its own task alone, which waits for it.",
        file="gateway/sse.py",
        text="transport.is_closing() or transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:\n",
        replacement="transport.is_closing():\n",
        tests=(f"{EVENTS}::test_a_client_that_lags_or_is_gone_is_not_written_to_past_the_response",),
    ),
    Plant(
        name="lost-connection-asked",
        rule="A connection that was lost is never asked again, as nobody reads its replies any more.",
        file="common/broker/pipeline.py",
        text="                if link is None or link.is_lost:\n",
        replacement="                if link is None:\n",
        tests=(f"{PIPELINE}::test_a_reply_that_is_cut_ends_the_connection_and_reaches_nobody",),
    ),
    Plant(
        name="unasked-reply-taken",
        rule="A reply that nobody asked for ends the connection.",
        file="common/broker/pipeline.py",
        text='            raise NotConnected(f"a reply that nobody asked for: {answer!r}")\n',
        replacement="            return\n",
        tests=(f"{PIPELINE}::test_a_reply_that_nobody_asked_for_ends_the_connection",),
    ),
    Plant(
        name="reply-of-another-command",
        rule="The reply of a command that was given up is nobody else's.",
        file="common/broker/pipeline.py",
        text="        reply = self._awaited.popleft()\n        if not reply.done():\n",
        replacement="        reply = self._awaited.popleft()\n"
        "        while reply.done() and self._awaited:\n"
        "            reply = self._awaited.popleft()\n"
        "        if not reply.done():\n",
        tests=(
            f"{PIPELINE}::test_the_reply_of_a_cancelled_command_is_nobodys",
            f"{FAULTS}::TestCancellation::test_b119_a_cancelled_command_never_answers_another_one",
        ),
    ),
)
