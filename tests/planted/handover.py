"""Bugs of the hand-over between prefill and decode workers. Names in capitals are switches of the protocol's model."""

from tests.planted.plant import Plant

PULLS = "tests/integration/test_handover_cancel.py"
MESSAGES = "tests/integration/test_handover_messages.py"
FAULTS = "tests/integration/test_handover_faults.py"
BINDINGS = "tests/integration/test_prefill_bindings.py"
JOBS = "tests/integration/test_job_intake.py"
SUSPECTS = "tests/integration/test_handover_suspects.py"
RECEPTION = "tests/unit/test_reception.py"
LEASES = "tests/unit/test_leases.py"
MACHINE = "tests/property/test_leases.py"
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
        text="(command.key, command.first)\n        return () if emission is None else (emission,)\n",
        replacement="(command.key, command.first)\n        return ()\n",
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
        text="            if self._clock() > deadline:\n",
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
        name="grantor-first",
        rule="The decode worker gives a binding up before the prefill worker may let go of it.",
        file="decode_worker/releases.py",
        text="GIVE_UP_SHARE = 0.75\n",
        replacement="GIVE_UP_SHARE = 1.25\n",
        tests=(f"{LEASES}::test_who_does_not_answer_is_given_up_before_it_may_let_go", MACHINE),
    ),
    Plant(
        name="counted-from-answer",
        rule="The decode worker counts a lease from when it asked for it, not from the answer.",
        file="decode_worker/releases.py",
        text="                attempt.renewed_at = sent_at\n",
        replacement="                attempt.renewed_at = self._clock()\n",
        tests=(f"{LEASES}::test_an_answer_counts_from_when_it_was_asked_for",),
    ),
    Plant(
        name="unknown-binding",
        rule="A binding that its holder does not hold any more is lost at once.",
        file="decode_worker/releases.py",
        text="            elif (key.request, key.placement, attempt.number) in unknown:\n",
        replacement="            elif False:\n",
        tests=(
            f"{LEASES}::test_what_is_not_held_is_lost_at_once",
            f"{FAULTS}::test_a_binding_that_is_not_held_any_more_is_tried_again_at_once",
        ),
    ),
    Plant(
        name="pause-blamed-on-peer",
        rule="A decode worker that was paused itself asks once more before it gives a binding up.",
        file="common/lifecycle/awake_clock.py",
        text="        if not self.is_standing:\n",
        replacement="        if True:\n",
        tests=(f"{LEASES}::test_who_was_paused_itself_asks_again_before_it_gives_up",),
    ),
    Plant(
        name="corrupt-page-accepted",
        rule="A page whose bytes are not those that were announced loses the try.",
        file="decode_worker/fetcher.py",
        text="            if found != announced:\n",
        replacement="            if False:\n",
        tests=(f"{SUSPECTS}::test_verify_pages_corrupt_bytes_lose_the_try",),
    ),
    Plant(
        name="innocent-loss-told",
        rule="Only a loss that may be the request's doing counts against its failure budget.",
        file="decode_worker/receiver.py",
        text="                if lost.loss.is_failure:\n",
        replacement="                if True:\n",
        tests=(f"{SUSPECTS}::test_what_is_not_the_requests_doing_is_not_told",),
    ),
    Plant(
        name="suspect-in-company",
        rule="A request that has lost its tries to prefill workers that died is computed beside nobody.",
        file="decode_worker/receiver.py",
        text="                live.is_suspect = reception.num_deaths >= SUSPECT_DEATHS\n",
        replacement="",
        tests=(f"{SUSPECTS}::test_a_request_that_has_lost_its_prefill_workers_runs_beside_nobody",),
    ),
    Plant(
        name="SUSPECT_BY_JOB",
        rule="Deaths over earlier placements and lost tries of this one make a suspect together.",
        file="decode_worker/receiver.py",
        text="        reception.num_deaths = live.job.num_deaths\n",
        replacement="",
        tests=(f"{SUSPECTS}::test_deaths_of_earlier_placements_and_lost_tries_add_up",),
    ),
    Plant(
        name="NO_HAND_BACK",
        rule="A worker where a suspect runs or waits to gives everybody else who waits there back.",
        file="decode_worker/scheduler.py",
        text="return [other.tickets[0].sequence.key for other in others if not _all_run(other)]",
        replacement="return []",
        tests=(f"{SUSPECTS}::test_whoever_waits_beside_a_suspect_is_given_back",),
    ),
    Plant(
        name="late-beside-suspect",
        rule="A job that comes to a worker with a suspect is given back.",
        file="decode_worker/intake.py",
        text="        if self._ledger.has_suspect_beside(live):\n",
        replacement="        if not live.job:\n",
        tests=(f"{SUSPECTS}::test_whoever_waits_beside_a_suspect_is_given_back",),
    ),
    Plant(
        name="suspect-goes-elsewhere",
        rule="A suspect is never prefilled elsewhere.",
        file="decode_worker/core.py",
        text="command.may_go_remote and not leader.runs_alone",
        replacement="command.may_go_remote",
        tests=(f"{SUSPECTS}::test_a_suspect_is_not_shared_with_a_prefill_worker",),
    ),
    Plant(
        name="late-job-computed",
        rule="A job that comes after its request's deadline is not computed.",
        file="decode_worker/intake.py",
        text="            if job.time_left_s <= 0:\n",
        replacement="            if False:\n",
        tests=(f"{JOBS}::test_a_job_that_comes_too_late_is_not_computed",),
    ),
    Plant(
        name="unread-jobs-lost",
        rule="A worker that leaves hands back the jobs that it has not read.",
        file="decode_worker/worker.py",
        text="            await self._intake.hand_back_unread(edge.worker, foundation.epoch)\n",
        replacement="",
        tests=(f"{JOBS}::test_a_job_that_is_placed_as_its_worker_leaves_is_handed_back",),
    ),
    Plant(
        name="crashes-cost-nothing",
        rule="What an engine had when it failed counts as lost with its process, not as handed back.",
        file="decode_worker/worker.py",
        text="                if code and live.prompt is not None:",
        replacement="                if False:",
        tests=(f"{FAULTS}::test_an_engine_that_raises_ends_its_worker",),
    ),
    Plant(
        name="unstarted-kept",
        rule="A worker that leaves hands back at once what it has not begun to compute.",
        file="decode_worker/core.py",
        text="                return [Unstarted(key) for key in self._scheduler.unstarted()]\n",
        replacement="                return []\n",
        tests=(
            f"{JOBS}::test_what_has_not_begun_is_handed_back_at_once_and_the_rest_finished",
            f"{JOBS}::test_a_reception_is_handed_back_when_its_worker_leaves",
        ),
    ),
    Plant(
        name="pause-fires-timers",
        rule="A timer does not fire because the process was paused.",
        file="common/lifecycle/timer.py",
        text="        if left_s <= 0:\n",
        replacement="        if True:\n",
        tests=("tests/unit/test_timer.py::test_a_pause_does_not_count",),
    ),
    Plant(
        name="death-needs-the-registry-or-time",
        rule="One connection that is refused is no death.",
        file="decode_worker/releases.py",
        text="        return not self._is_listed(source) or now - since >= self._lease_s * REFUSED_SHARE\n",
        replacement="        return True\n",
        tests=(f"{LEASES}::test_a_connection_that_is_made_again_is_no_death",),
    ),
    Plant(
        name="dead-waited-for",
        rule="A holder that refuses and that the registry does not have is lost at once.",
        file="decode_worker/releases.py",
        text="        return not self._is_listed(source) or now - since",
        replacement="        return now - since",
        tests=(f"{LEASES}::test_b048_who_refuses_and_is_not_registered_any_more_is_lost_at_once",),
    ),
    Plant(
        name="stalled-holder-kept",
        rule="A holder that is stalled loses its tries.",
        file="decode_worker/releases.py",
        text="            elif reply.is_stalled:\n",
        replacement="            elif False:\n",
        tests=(f"{LEASES}::test_a_holder_that_is_stalled_is_given_up",),
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
            MACHINE,
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
        name="unanswered-but-held",
        rule="A prefill worker whose call was not answered ends the binding.",
        file="prefill_worker/announcer.py",
        text="            if not is_committed:  # its author",
        replacement="            if False:  # its author",
        tests=(
            f"{BINDINGS}::test_an_author_that_is_gone_when_its_pages_are_ready",
            f"{BINDINGS}::test_an_announcer_that_fails_lets_go",
        ),
    ),
    Plant(
        name="forgotten-while-bound",
        rule="A binding counts as held while the answer to its bind is under way.",
        file="prefill_worker/holdings.py",
        text="            elif key not in self._binding:\n",
        replacement="            else:\n",
        tests=(
            f"{HOLDINGS}::test_a_binding_that_is_being_made_is_known",
            f"{BINDINGS}::test_a_renewal_may_overtake_the_answer_to_the_bind",
        ),
    ),
    Plant(
        name="held-for-a-dead-gateway",
        rule="A worker frees what it holds for a gateway that stays away.",
        file="decode_worker/worker.py",
        text="        self._intake.cancel_gateway(gateway)\n",
        replacement="        pass\n",
        tests=(f"{PULLS}::test_a_gateway_that_hangs_up_loses_its_requests",),
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
