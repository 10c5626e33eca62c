"""Bugs of the gateway: what of the workers' words reaches a client."""

from tests.planted.plant import Plant

STREAMS = "tests/unit/test_streams.py"
MACHINE = "tests/property/test_streams.py"
DISPATCH = "tests/integration/test_dispatch.py"
FEEDS = "tests/integration/test_feeds.py"
DETOKENIZER = "tests/property/test_detokenizer.py"

PLANTS = (
    Plant(
        name="IDX_ONLY",
        rule="A token is taken from the current placement only.",
        file="gateway/streams.py",
        text="        if event.placement != self.placement or self.is_over or",
        replacement="        if self.is_over or",
        tests=(MACHINE,),
    ),
    Plant(
        name="source-ignored",
        rule="A token is taken from the worker that accepted the placement only.",
        file="gateway/streams.py",
        text=(
            "            case _ if source != self.source:\n"
            "                self._give_up_unaccepted(source)\n"
            "                return False\n"
        ),
        replacement="",
        tests=(f"{STREAMS}::test_old_placements_and_other_workers_are_outdated", MACHINE),
    ),
    Plant(
        name="NO_CHAIN",
        rule="Tokens that continue others than were shown are refused.",
        file="gateway/streams.py",
        text="        if tokens.chain != self._chains[tokens.index] or list(",
        replacement="        if list(",
        tests=(f"{STREAMS}::test_a_diverging_worker_loses_the_placement", MACHINE),
    ),
    Plant(
        name="repetition-unchecked",
        rule="Tokens that a worker repeats are those that were shown.",
        file="gateway/streams.py",
        text=" or list(tokens.ids[:num_known]) != known[: len(tokens.ids)]:",
        replacement=":",
        tests=(f"{STREAMS}::test_a_diverging_worker_loses_the_placement", MACHINE),
    ),
    Plant(
        name="gap-shown",
        rule="Only the next index is shown.",
        file="gateway/streams.py",
        text="        if tokens.index > len(self.shown):\n",
        replacement="        if tokens.index > len(self.shown) + 1000:\n",
        tests=(f"{STREAMS}::test_missing_frames_lose_the_placement", MACHINE),
    ),
    Plant(
        name="early-copy-anywhere",
        rule="An early copy is shown only if it is the next token.",
        file="gateway/streams.py",
        text="        if tokens.index == len(self.shown) and tokens.chain == self._chains[-1]:\n",
        replacement="        if True:\n",
        tests=(f"{STREAMS}::test_a_late_early_copy_changes_nothing", MACHINE),
    ),
    Plant(
        name="early-copy-of-another-stream",
        rule="An early copy is shown only if it continues what was shown.",
        file="gateway/streams.py",
        text="        if tokens.index == len(self.shown) and tokens.chain == self._chains[-1]:\n",
        replacement="        if tokens.index == len(self.shown):\n",
        tests=(MACHINE,),
    ),
    Plant(
        name="early-copy-behind-the-end",
        rule="Nothing is shown behind the end of an answer, whoever sends it ahead.",
        file="gateway/streams.py",
        text="        if isinstance(self._ending, EndOfChoice):  # an early copy may come late\n            return\n",
        replacement="",
        tests=("tests/unit/test_stream_endings.py",),
    ),
    Plant(
        name="end-without-tokens",
        rule="An end that counts more tokens than were shown is none.",
        file="gateway/streams.py",
        text="        if finished.num_generated != len(self.shown):\n",
        replacement="        if False:\n",
        tests=(f"{STREAMS}::test_an_end_that_counts_more_tokens_loses_the_placement", MACHINE),
    ),
    Plant(
        name="second-ending",
        rule="The first word about the end of a placement counts.",
        file="gateway/streams.py",
        text="        self._ending = self._ending or ending\n",
        replacement="        self._ending = ending\n",
        tests=(f"{STREAMS}::test_the_first_ending_counts", MACHINE),
    ),
    Plant(
        name="second-acceptor",
        rule="A placement belongs to the first worker that accepts it.",
        file="gateway/streams.py",
        text="        if self.source is None and self._ending is None:\n",
        replacement="        if True:\n",
        tests=(MACHINE,),
    ),
    Plant(
        name="lost-by-anybody",
        rule="Only the loss of the worker that has the placement loses it.",
        file="gateway/streams.py",
        text="        if source == (self.source or self.target):\n",
        replacement="        if True:\n",
        tests=(f"{STREAMS}::test_only_the_holder_of_the_placement_can_lose_it", MACHINE),
    ),
    Plant(
        name="NO_ACCEPT_TIMER",
        rule="A placement that nobody accepts in time is placed again.",
        file="gateway/placing.py",
        text='                stream.give_up("no worker has accepted the request in time")\n',
        replacement="                pass\n",
        tests=(f"{DISPATCH}::test_an_unaccepted_job_is_placed_again",),
    ),
    Plant(
        name="shown-sampled-again",
        rule="What was shown is a forced prefix of the next placement: it is never sampled again.",
        file="gateway/placing.py",
        text="            choices=(OpenChoice(FIRST_CHOICE, pack_ids(stream.shown)),),\n",
        replacement="            choices=(OpenChoice(FIRST_CHOICE),),\n",
        tests=(f"{DISPATCH}::test_a_lost_worker_is_replaced_and_the_stream_continues",),
    ),
    Plant(
        name="endless-retries",
        rule="One failure budget per request ends it.",
        file="gateway/streams.py",
        text="        if self.num_failures >= self._max_failures:\n",
        replacement="        if self.num_failures >= 100:\n",
        tests=(f"{DISPATCH}::test_the_failure_budget_ends_in_one_error",),
    ),
    Plant(
        name="old-placement-runs-on",
        rule="A placement that is followed by another one is cancelled.",
        file="gateway/dispatch.py",
        text="        self._release(stream)\n        self._metrics.note_failover",
        replacement="        self._metrics.note_failover",
        tests=(f"{DISPATCH}::test_a_diverging_worker_is_cancelled_and_shown_tokens_win",),
    ),
    Plant(
        name="late-acceptance-runs-on",
        rule="A worker that accepts an outdated placement is told to release it.",
        file="gateway/dispatch.py",
        text="        if event.tokens.is_early:\n            return\n",
        replacement="        return\n",
        tests=(f"{FEEDS}::TestStaleAnswers::test_every_outdated_event_is_counted_and_answered_once",),
    ),
    Plant(
        name="cancel-forgotten",
        rule="A client that leaves cancels its request at the worker.",
        file="gateway/dispatch.py",
        text="            if not stream.is_over:\n                self._release(stream)\n",
        replacement="",
        tests=(
            f"{DISPATCH}::test_closing_the_generator_cancels_at_the_worker",
            f"{DISPATCH}::test_a_cancelled_waiting_request_leaves_the_queue",
        ),
    ),
    Plant(
        name="complete-answer-continued",
        rule="A complete answer whose terminal event was lost is over.",
        file="gateway/dispatch.py",
        text="        if end is not None:\n            return end\n",
        replacement="",
        tests=(f"{DISPATCH}::test_only_the_terminal_event_was_lost",),
    ),
    Plant(
        name="continued-by-another-version",
        rule="A stream is never continued by another version of the model.",
        file="gateway/dispatch.py",
        text="        is_foreign = is_unnamed or record.fingerprint != stream.fingerprint\n",
        replacement="        is_foreign = is_unnamed\n",
        tests=(
            "tests/integration/test_model_versions.py::test_a_waiting_job_that_another_version_takes_is_placed_again",
        ),
    ),
    Plant(
        name="half-characters-shown",
        rule="A character that is split over tokens is held back until it is whole.",
        file="gateway/detokenizer.py",
        text='        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))\n',
        replacement='        return b"".join(map(self._bytes_of, token_ids)).decode(errors="replace")\n',
        tests=(DETOKENIZER,),
    ),
    Plant(
        name="half-runs-shown",
        rule="A run of byte tokens is settled as a whole.",
        file="gateway/detokenizer.py",
        text="        if self._is_byte(token_id) or self._decode(self._window).endswith(REPLACEMENT):\n",
        replacement="        if self._decode(self._window).endswith(REPLACEMENT):\n",
        tests=("tests/unit/test_detokenizer.py::test_b008_byte_fallback_is_held_until_the_run_of_bytes_ends",),
    ),
    Plant(
        name="tail-forgotten",
        rule="What a detokenizer held back comes with the end of the answer.",
        file="gateway/detokenizer.py",
        text='        return self._decoder.decode(b"", final=True)\n',
        replacement='        return ""\n',
        tests=(DETOKENIZER,),
    ),
)
