"""Bugs of the hand-over between prefill and decode workers. Names in capitals are switches of the protocol's model."""

from tests.planted.plant import Plant

PULLS = "tests/integration/test_handover_cancel.py"
MESSAGES = "tests/integration/test_handover_messages.py"
FAULTS = "tests/integration/test_handover_faults.py"
BINDINGS = "tests/integration/test_prefill_bindings.py"
JOBS = "tests/integration/test_job_intake.py"
RECEPTION = "tests/unit/test_reception.py"
LEASES = "tests/unit/test_leases.py"
HOLDINGS = "tests/unit/test_holdings.py"
CORE = "tests/unit/test_decode_core.py"

PLANTS = (
    Plant(
        name="FREE_DST",
        rule="A running copy owns its target page together with the sequence.",
        file="decode_worker/core.py",
        text="        self._pool.share(missing)\n        self._lent[sequence.key] = missing\n",
        replacement="        self._lent[sequence.key] = ()\n",
        tests=(
            f"{CORE}::test_b036_a_cancelled_sequence_keeps_its_pages_until_they_are_let_go",
            f"{PULLS}::test_b038_no_other_request_gets_a_page_into_which_a_copy_runs",
        ),
    ),
    Plant(
        name="pulls-run-on",
        rule="The pulls of a try are stopped before its pages are let go.",
        file="decode_worker/receiver.py",
        text="        await attempt.stop()\n",
        replacement="",
        tests=(f"{PULLS}::test_b038_no_other_request_gets_a_page_into_which_a_copy_runs",),
    ),
    Plant(
        name="FREE_SRC",
        rule="The pages of a finished prefill are held until the puller releases them.",
        file="prefill_worker/announcer.py",
        text="            if not is_committed:  # its author",
        replacement="            if True:  # its author",
        tests=(f"{BINDINGS}::test_draining_waits_for_the_pages_to_be_pulled",),
    ),
    Plant(
        name="NO_COMPLETE",
        rule="Decoding starts when the first token and every wanted page of the same try are there.",
        file="decode_worker/reception.py",
        text="if self.commit is not None and self.arrived >= self.wanted and not",
        replacement="if self.commit is not None and not",
        tests=(
            f"{RECEPTION}::test_it_is_won_by_token_and_all_pages",
            f"{MESSAGES}::test_b042_a_commit_without_all_pages_starts_nothing",
        ),
    ),
    Plant(
        name="NO_REPEAT",
        rule="The decode worker repeats the first token in its own frames, whoever sampled it.",
        file="decode_worker/core.py",
        text="        return () if emission is None else (emission,)\n",
        replacement="        return ()\n",
        tests=(f"{CORE}::test_activation_emits_the_first_token_and_decoding_goes_on",),
    ),
    Plant(
        name="KEEP_OLD",
        rule="A renewal extends the bindings that it names, not all of a peer.",
        file="prefill_worker/holdings.py",
        text="                holding.expires_at = self._clock() + holding.lease_s\n",
        replacement=(
            "                for other in self._held.values():\n"
            "                    other.expires_at = self._clock() + other.lease_s\n"
        ),
        tests=(f"{HOLDINGS}::test_a_lease_runs_from_its_last_renewal",),
    ),
    Plant(
        name="superseded-untold",
        rule="Whoever is bound to a try that is over is told.",
        file="decode_worker/receiver.py",
        text="            self._releases.add(attempt.source, key, attempt.number)\n",
        replacement="            pass\n",
        tests=(
            f"{MESSAGES}::test_b054_messages_of_another_try",
            f"{PULLS}::test_b036_a_prefill_worker_that_never_says_done",
        ),
    ),
    Plant(
        name="superseded-renewed",
        rule="The bindings of earlier tries are not renewed.",
        file="decode_worker/reception.py",
        text="attempt.outcome.done() or attempt.number != binding.try_number",
        replacement="attempt.outcome.done()",
        tests=(f"{RECEPTION}::test_only_the_running_try_is_current", f"{MESSAGES}::test_b054_messages_of_another_try"),
    ),
    Plant(
        name="ACK_BY_P",
        rule="Only its author deletes a task.",
        file="prefill_worker/intake.py",
        text="            reply = await self._bind(delivery, author)\n",
        replacement=(
            "            reply = await self._bind(delivery, author)\n"
            "            await self._tasks.delete(delivery.entry)\n"
        ),
        tests=(f"{BINDINGS}::test_a_bind_that_is_refused",),
    ),
    Plant(
        name="NO_ORPHAN",
        rule="A claimer deletes a task whose author's epoch is gone.",
        file="prefill_worker/intake.py",
        text='            logger.info("deleting the task of a decode worker that is gone", extra=details)\n'
        "            await self._tasks.delete(delivery.entry)\n",
        replacement='            logger.info("leaving the task of a decode worker that is gone", extra=details)\n',
        tests=(f"{BINDINGS}::test_the_task_of_an_author_that_is_gone_is_deleted",),
    ),
    Plant(
        name="orphan-after-claim",
        rule="The task of an author that dies after the claim is deleted by its claimer.",
        file="prefill_worker/intake.py",
        text="                self._claims.pop(entry, None)\n                await self._tasks.delete(entry)\n",
        replacement="                self._claims.pop(entry, None)\n",
        tests=(f"{BINDINGS}::test_the_task_of_an_author_that_dies_after_the_claim_is_deleted",),
    ),
    Plant(
        name="orphan-of-dead-claimer",
        rule="Orphans whose claimers are dead, too, are swept.",
        file="prefill_worker/intake.py",
        text="                        await self._tasks.delete(delivery.entry)\n",
        replacement="                        pass\n",
        tests=(f"{BINDINGS}::test_orphans_of_dead_claimers_are_swept_and_others_left",),
    ),
    Plant(
        name="NO_REPUB",
        rule="A task that nobody binds in time is published again.",
        file="decode_worker/receiver.py",
        text="            if time.monotonic() > deadline:\n",
        replacement="            if False:\n",
        tests=(f"{FAULTS}::test_a_task_that_nobody_binds_is_published_again_and_then_kept",),
    ),
    Plant(
        name="REUSE_TRY",
        rule="The author numbers its tries, each with a number of its own.",
        file="decode_worker/receiver.py",
        text="self._try(reception, live, num_tokens, TryNumber(number))",
        replacement="self._try(reception, live, num_tokens, TryNumber(1))",
        tests=(f"{MESSAGES}::test_b054_messages_of_another_try",),
    ),
    Plant(
        name="tombstone-job",
        rule="The job of a placement that was cancelled before it came is not run.",
        file="decode_worker/intake.py",
        text="        self._ledger.bury(request, placement)\n",
        replacement="",
        tests=(f"{PULLS}::test_before_the_job_arrives",),
    ),
    Plant(
        name="tombstone-older",
        rule="A tombstone covers older placements, and a younger one replaces it.",
        file="decode_worker/ledger.py",
        text="        newest = max(placement, self._tombstones.pop(request, placement))\n",
        replacement="        newest = placement\n",
        tests=("tests/unit/test_ledger.py::test_an_older_cancel_does_not_dig_up",),
    ),
    Plant(
        name="redelivered-job",
        rule="A job that is delivered twice runs once.",
        file="decode_worker/intake.py",
        text="        if current.job.placement >= job.placement:\n",
        replacement="        if current.job.placement > job.placement:\n",
        tests=(f"{JOBS}::test_a_job_that_is_delivered_twice_runs_once",),
    ),
    Plant(
        name="resurrected-job",
        rule="The job of a placement that is over does not run again.",
        file="decode_worker/ledger.py",
        text="        self.bury(key.request, key.placement)\n",
        replacement="",
        tests=(f"{JOBS}::test_b054_a_job_that_is_over_does_not_come_back",),
    ),
    Plant(
        name="superseded-placement",
        rule="A younger placement ends the older one of its request.",
        file="decode_worker/intake.py",
        text="        self.close(current.key)\n        return True\n",
        replacement="        return True\n",
        tests=(f"{JOBS}::test_a_higher_placement_supersedes",),
    ),
    Plant(
        name="redelivered-task",
        rule="A task that is delivered twice is computed once.",
        file="prefill_worker/intake.py",
        text="        if self._holdings.get(key) is not None:\n            return\n",
        replacement="",
        tests=(f"{BINDINGS}::test_a_task_that_is_delivered_twice_is_computed_once",),
    ),
    Plant(
        name="release-overtakes-bind",
        rule="A release that overtakes the answer to the bind wins.",
        file="prefill_worker/holdings.py",
        text="        self._binding.discard(key)\n        holding = self._held.pop(key, None)\n",
        replacement="        holding = self._held.pop(key, None)\n",
        tests=(
            f"{HOLDINGS}::test_a_release_that_overtakes_the_bind_wins",
            f"{BINDINGS}::test_a_release_may_overtake_the_answer_to_the_bind",
        ),
    ),
    Plant(
        name="commit-overwritten",
        rule="A repeated commit changes nothing.",
        file="decode_worker/reception.py",
        text="        if self.commit is None:\n            self.commit = commit\n",
        replacement="        self.commit = commit\n",
        tests=(
            f"{RECEPTION}::test_the_first_commit_counts",
            f"{MESSAGES}::test_b054_chunks_that_come_twice_and_out_of_order",
        ),
    ),
    Plant(
        name="pulled-twice",
        rule="A page is never pulled twice in one try.",
        file="decode_worker/receiver.py",
        text="        attempt.requested.update(copies)\n",
        replacement="",
        tests=(
            f"{MESSAGES}::test_b054_a_page_that_is_announced_twice_is_pulled_once",
            f"{MESSAGES}::test_b054_chunks_that_come_twice_and_out_of_order",
        ),
    ),
    Plant(
        name="bound-to-anybody",
        rule="A try belongs to the first incarnation that binds it.",
        file="decode_worker/reception.py",
        text="        if self.source is None:\n            self.source = source\n",
        replacement="        if True:\n            self.source = source\n",
        tests=(
            f"{RECEPTION}::test_it_belongs_to_the_first_incarnation_that_binds",
            f"{MESSAGES}::test_the_first_to_bind_has_it",
        ),
    ),
    Plant(
        name="epoch-of-sender",
        rule="Messages of another incarnation than the bound one are stale.",
        file="decode_worker/reception.py",
        text="        return self.source is not None and self.source.epoch == epoch\n",
        replacement="        return self.source is not None\n",
        tests=(f"{MESSAGES}::test_messages_of_another_incarnation",),
    ),
    Plant(
        name="epoch-of-feed",
        rule="A feed is served to who asks for this very incarnation.",
        file="common/runtime/servicer.py",
        text="        if request.epoch != self._epoch:\n",
        replacement="        if False:\n",
        tests=("tests/integration/test_worker_desk.py::test_b048_a_feed_of_another_incarnation_is_refused",),
    ),
    Plant(
        name="epoch-of-peer",
        rule="A worker of the registry is the one that is meant only if its epoch is.",
        file="common/runtime/peers.py",
        text="state.record if state is not None and state.record.epoch == epoch else None",
        replacement="state.record if state is not None else None",
        tests=(
            "tests/unit/test_peers.py::test_b048_a_restart_replaces_the_old_incarnation",
            f"{BINDINGS}::test_the_task_of_an_author_that_is_gone_is_deleted",
        ),
    ),
    Plant(
        name="epoch-of-renewal",
        rule="A renewal that another incarnation answers renews nothing.",
        file="decode_worker/releases.py",
        text="if reply.epoch != source.epoch or (",
        replacement="if (",
        tests=(f"{LEASES}::test_b048_another_incarnation_holds_nothing_of_ours",),
    ),
    Plant(
        name="fingerprint-at-bind",
        rule="A bind with another fingerprint is refused in words.",
        file="decode_worker/servicer.py",
        text="        if request.fingerprint != self._fingerprint:\n",
        replacement="        if False:\n",
        tests=(f"{MESSAGES}::test_b043_another_fingerprint_is_refused_in_words",),
    ),
    Plant(
        name="fingerprint-of-peer",
        rule="Workers of another fingerprint are no peers.",
        file="common/runtime/peers.py",
        text="        return record.fingerprint == self._fingerprint\n",
        replacement="        return True\n",
        tests=("tests/unit/test_peers.py::test_b043_another_fingerprint_is_refused_in_words_once",),
    ),
    Plant(
        name="grantor-first",
        rule="The decode worker gives a binding up before the prefill worker may let go of it.",
        file="decode_worker/releases.py",
        text="GIVE_UP_SHARE = 0.75\n",
        replacement="GIVE_UP_SHARE = 1.25\n",
        tests=(f"{LEASES}::test_who_does_not_answer_is_given_up_before_it_may_let_go",),
    ),
    Plant(
        name="counted-from-answer",
        rule="The decode worker counts a lease from when it asked for it, not from the answer.",
        file="decode_worker/releases.py",
        text="                attempt.renewed_at = sent_at\n",
        replacement="                attempt.renewed_at = time.monotonic()\n",
        tests=(f"{LEASES}::test_an_answer_counts_from_when_it_was_asked_for",),
    ),
    Plant(
        name="unknown-binding",
        rule="A binding that its holder does not hold any more is lost at once.",
        file="decode_worker/releases.py",
        text=" or (key.request, key.placement, attempt.number) in unknown:",
        replacement=":",
        tests=(
            f"{LEASES}::test_what_is_not_held_is_lost_at_once",
            f"{FAULTS}::test_a_binding_that_is_not_held_any_more_is_tried_again_at_once",
        ),
    ),
    Plant(
        name="pause-blamed-on-peer",
        rule="A decode worker that was paused itself asks once more before it gives a binding up.",
        file="decode_worker/releases.py",
        text="            if was_paused:  #",
        replacement="            if False:  #",
        tests=(f"{LEASES}::test_who_was_paused_itself_asks_again_before_it_gives_up",),
    ),
    Plant(
        name="lease-unreaped",
        rule="A binding whose lease is over is let go by a timer.",
        file="prefill_worker/holdings.py",
        text="            self.end(holding.key)\n        return expired\n",
        replacement="        return expired\n",
        tests=(
            f"{HOLDINGS}::test_a_lease_runs_from_its_last_renewal",
            f"{BINDINGS}::test_b039_a_lease_that_is_not_renewed_ends",
        ),
    ),
    Plant(
        name="cancelled-before-it-ran",
        rule="A reception that is cancelled before its first step lets its pages go, too.",
        file="decode_worker/receiver.py",
        text="        task.add_done_callback(partial(self._let_go, reception))\n",
        replacement="        task.add_done_callback(lambda done: done.cancelled() or self._let_go(reception, done))\n",
        tests=(f"{PULLS}::test_in_the_moment_in_which_its_pages_are_reserved",),
    ),
    Plant(
        name="refusal-ignored",
        rule="A prefill worker stops at an answer that is not 'go'.",
        file="prefill_worker/announcer.py",
        text="                if await self._tell(stub, holding, span) != pb.VERDICT_GO:\n                    return\n",
        replacement="                await self._tell(stub, holding, span)\n",
        tests=(f"{BINDINGS}::test_an_announcement_that_is_refused_ends_the_work",),
    ),
)
