"""Bugs of what happens under duress: pauses, stalls, suspects, drains, deadlines, canaries that do not come back."""

from tests.planted.plant import Plant

BUDGET = "tests/integration/test_failure_budget.py"
CHOSEN = "tests/integration/test_chosen_workers.py"
FEEDS = "tests/integration/test_feeds.py"
PREFILL = "tests/integration/test_prefill_duress.py"
PROOFS = "tests/unit/test_proofs.py"
PLACEMENT = "tests/contract/test_broker_placement.py"

PLANTS = (
    Plant(
        name="ready-before-warm",
        rule="An engine's first steps come before the worker is ready, and are not judged by how long they take.",
        file="common/runtime/edge.py",
        text="        if not await self._comes_before_a_crash(warm):\n",
        replacement="        if False:\n",
        tests=(f"{PREFILL}::TestWarmUp::test_slow_first_steps_are_no_stall_and_come_before_readiness",),
    ),
    Plant(
        name="frames-without-bound",
        rule="Events that are large do not share a frame: one that is too large would end the feed of a whole worker.",
        file="common/runtime/feeds.py",
        text="            if events[-1].tokens.prompt_logprobs:\n                break\n",
        replacement="",
        tests=("tests/unit/test_feed_hub.py::test_logprobs_of_prompts_end_a_frame_so_that_none_is_too_large",),
    ),
    Plant(
        name="open-with-a-suspect",
        rule="Nothing is placed on a worker that has a suspect.",
        file="common/messages/registry.py",
        text="        return self.health is WorkerHealth.READY and not self.is_exclusive\n",
        replacement="        return self.health is WorkerHealth.READY\n",
        tests=(f"{BUDGET}::TestSuspects::test_while_a_suspect_has_the_only_worker_others_wait",),
    ),
    Plant(
        name="waiting-beyond-its-deadline",
        rule="A waiting job is given to nobody after its deadline.",
        file="common/broker/lanes.lua",
        text="  return has_lease(place.gateway) and not (place.ends and place.ends <= now)\n",
        replacement="  return has_lease(place.gateway)\n",
        tests=(f"{PLACEMENT}::TestDeadlines::test_a_waiting_job_is_given_to_nobody_after_its_deadline",),
    ),
    Plant(
        name="suspect-beside-others",
        rule="A request over which workers died runs alone.",
        file="gateway/placing.py",
        text="            runs_alone=stream.budget.is_suspect,\n",
        replacement="            runs_alone=False,\n",
        tests=(
            f"{BUDGET}::TestSuspects::test_after_two_deaths_it_runs_alone",
            f"{BUDGET}::TestSuspects::test_lost_tries_make_suspects_too",
        ),
    ),
    Plant(
        name="tries-cost-nothing",
        rule="A lost try to prefill uses up the failure budget, as a lost placement does.",
        file="gateway/streams.py",
        text="                self._end_if(self.budget.fail(event.try_lost.reason, is_death=True))\n",
        replacement="                pass\n",
        tests=(f"{BUDGET}::TestBudget::test_tries_and_placements_share_it",),
    ),
    Plant(
        name="drain-is-failure",
        rule="A worker that drains uses up no failure of its requests.",
        file="gateway/streams.py",
        text="PlacementLost(_BLAMELESS[failed.code], failed.message, is_failure=False)",
        replacement="PlacementLost(_BLAMELESS[failed.code], failed.message)",
        tests=(
            f"{BUDGET}::TestBudget::test_draining_workers_use_up_nothing",
            f"{BUDGET}::TestBudget::test_whoever_is_displaced_by_a_suspect_goes_elsewhere_at_no_cost",
        ),
    ),
    Plant(
        name="COUNT_UNACCEPTED",
        rule="A job that its worker has not accepted when it dies costs no failure.",
        file="gateway/streams.py",
        text="        if loss.is_failure and self.source is None:\n",
        replacement="        if not loss.text:\n",
        tests=(
            "tests/unit/test_streams.py::test_a_worker_that_died_before_it_accepted_costs_nothing_until_it_is_the_third",
        ),
    ),
    Plant(
        name="displaced-comes-back",
        rule="Who was displaced by a suspect is not given to the same worker at once.",
        file="gateway/streams.py",
        text="        return self.leaving if self.displacer is None else {*self.leaving, self.displacer}",
        replacement="        return self.leaving",
        tests=(f"{BUDGET}::TestBudget::test_whoever_is_displaced_by_a_suspect_goes_elsewhere_at_no_cost",),
    ),
    Plant(
        name="emptied-redis-is-failure",
        rule="That Redis has lost a job uses up no failure of its request.",
        file="gateway/streams.py",
        text="PlacementLost(LossReason.UNACCEPTED, text, is_failure=self._may_have_killed)",
        replacement="PlacementLost(LossReason.UNACCEPTED, text)",
        tests=(f"{BUDGET}::TestBudget::test_an_emptied_redis_uses_up_nothing",),
    ),
    Plant(
        name="placed-on-a-leaver",
        rule="A worker that gave a request back because it drains is not asked again.",
        file="gateway/streams.py",
        text="            self.leaving.add(self.source)\n",
        replacement="            pass\n",
        tests=(f"{BUDGET}::TestBudget::test_a_draining_worker_is_not_asked_again",),
    ),
    Plant(
        name="pause-of-gateway-blamed",
        rule="A gateway that was paused itself loses no worker for that.",
        file="gateway/silence.py",
        text="            self._grace_until_s = now_s + GRACE_S\n",
        replacement="            pass\n",
        tests=(f"{FEEDS}::TestSilence::test_our_own_pause_loses_nobody",),
    ),
    Plant(
        name="silence-unnoticed",
        rule="A worker that is silent for too long is lost, although its connection stands.",
        file="gateway/silence.py",
        text=" if now_s - heard_at >= self._limit_s]",
        replacement=" if now_s - heard_at >= 1000.0]",
        tests=(f"{FEEDS}::TestSilence::test_a_frozen_worker_s_requests_move",),
    ),
    Plant(
        name="stall-unnoticed",
        rule="The requests of a worker that makes no progress move, although its feed is fine.",
        file="gateway/feeds.py",
        text="        if frame.is_stalled:\n            self._lose(",
        replacement="        if False:\n            self._lose(",
        tests=(f"{FEEDS}::TestStall::test_a_stalled_worker_s_requests_move",),
    ),
    Plant(
        name="thawed-untold",
        rule="A worker that thaws is told what was over meanwhile.",
        file="gateway/dispatch.py",
        text="        self._canceller.resume(source)\n",
        replacement="        pass\n",
        tests=(f"{FEEDS}::TestStaleAnswers::test_also_one_that_has_nothing_to_say",),
    ),
    Plant(
        name="pause-of-prefill-blamed",
        rule="A prefill worker that was paused itself lets no binding expire for that.",
        file="prefill_worker/worker.py",
        text="Holdings(edge.submit, self._note_ended, edge.clock.now)",
        replacement="Holdings(edge.submit, self._note_ended)",
        tests=(f"{PREFILL}::TestPause::test_leases_outlast_a_pause_of_ours",),
    ),
    Plant(
        name="stalled-and-claiming",
        rule="A prefill worker whose engine makes no progress claims nothing.",
        file="prefill_worker/worker.py",
        text="        is_open = self._edge.health is WorkerHealth.READY\n",
        replacement="        is_open = True\n",
        tests=(f"{PREFILL}::TestStall::test_it_claims_nothing_while_it_is_stalled",),
    ),
    Plant(
        name="never-hopeless",
        rule="An engine that makes no progress for long ends its process.",
        file="common/runtime/stall.py",
        text="        if still_s >= self._stall_s * HOPELESS_FACTOR:\n",
        replacement="        if False:\n",
        tests=(
            "tests/unit/test_stall.py::test_a_busy_engine_that_completes_nothing_is_stalled_then_hopeless",
            f"{PREFILL}::TestStall::test_a_hopeless_one_ends_itself",
        ),
    ),
    Plant(
        name="doubted-but-used",
        rule="A worker whose canary did not come back gets no work.",
        file="gateway/proofs.py",
        text="        return standing is None or not standing.doubt\n",
        replacement="        return True\n",
        tests=(
            f"{CHOSEN}::TestTrust::test_a_doubted_worker_gets_no_work",
            f"{PROOFS}::test_a_doubted_worker_leaves_until_something_comes_back",
        ),
    ),
    Plant(
        name="ready-without-proof",
        rule="A gateway is ready while a worker that serves has proved itself lately.",
        file="gateway/proofs.py",
        text="        oldest = self._clock() - self._window_s\n",
        replacement="        oldest = float('-inf')\n",
        tests=(f"{PROOFS}::test_one_proof_makes_ready_for_the_window",),
    ),
    Plant(
        name="one-token-proves",
        rule="One token proves no decoding: it comes from the prefill.",
        file="gateway/dispatch.py",
        text="MIN_PROOF_TOKENS = 2\n",
        replacement="MIN_PROOF_TOKENS = 1\n",
        tests=("tests/integration/test_readiness.py::test_one_token_proves_no_decoding",),
    ),
    Plant(
        name="deadline-passed",
        rule="A request ends when its time is over, wherever it is.",
        file="gateway/streams.py",
        text="            self._timer = asyncio.get_running_loop().call_later(seconds, self.end, error)\n",
        replacement="            pass\n",
        tests=("tests/integration/test_request_deadlines.py::test_a_worker_that_is_too_slow_is_told",),
    ),
)
