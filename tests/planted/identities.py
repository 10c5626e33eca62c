"""Bugs of telling placements, tries, epochs and fingerprints apart: whose message counts, and whose does not."""

from tests.planted.plant import Plant

PULLS = "tests/integration/test_handover_cancel.py"
MESSAGES = "tests/integration/test_handover_messages.py"
BINDINGS = "tests/integration/test_prefill_bindings.py"
JOBS = "tests/integration/test_job_intake.py"
RECEPTION = "tests/unit/test_reception.py"
LEASES = "tests/unit/test_leases.py"
HOLDINGS = "tests/unit/test_holdings.py"

PLANTS = (
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
        tests=("tests/integration/test_superseded_placements.py",),
    ),
    Plant(
        name="redelivered-task",
        rule="A task that is delivered twice is computed once.",
        file="prefill_worker/holdings.py",
        text=" or holding.key in self._held:\n",
        replacement=":\n",
        tests=(f"{HOLDINGS}::test_a_binding_is_held_once",),
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
        text="            if reply.epoch != source.epoch:\n",
        replacement="            if False:\n",
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
)
