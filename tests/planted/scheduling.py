"""Bugs of the two schedulers and of sampling."""

from tests.planted.plant import Plant

DECODE = "tests/unit/test_decode_scheduler.py"
PREFILL = "tests/unit/test_prefill_scheduler.py"
REMOTE = "tests/unit/test_remote_prefill.py::TestRemote"
DECODE_MACHINE = "tests/property/test_decode_scheduler.py"
PREFILL_MACHINE = "tests/property/test_prefill_scheduler.py"
SEEDS = "tests/unit/test_sampling.py::TestSeeds"

PLANTS = (
    Plant(
        name="suspect-joins-others",
        rule="A sequence that runs alone waits until nobody else has pages.",
        file="decode_worker/admission.py",
        text="            return not present\n",
        replacement="            return True\n",
        tests=(f"{DECODE}::TestAlone::test_it_waits_for_those_before_it_and_those_behind_it_wait",),
    ),
    Plant(
        name="others-join-suspect",
        rule="Nobody is admitted beside a sequence that runs alone.",
        file="decode_worker/admission.py",
        text="        return not any(other.sequence.runs_alone for other in present)\n",
        replacement="        return True\n",
        tests=("tests/unit/test_decode_scheduler.py::TestAlone::test_nobody_joins_it_while_its_prompt_is_computed",),
    ),
    Plant(
        name="no-watermark",
        rule="A sequence is admitted only with room for one step of every running sequence.",
        file="decode_worker/admission.py",
        text="        num_owed = sum(self._blocks.num_missing(ticket.sequence) for ticket in running)\n",
        replacement="        num_owed = 0\n",
        tests=("tests/unit/test_watermark.py::test_a_newcomer_waits_for_room_beside_the_next_step",),
    ),
    Plant(
        name="head-overtaken",
        rule="Nobody overtakes the oldest waiting sequence of a decode worker.",
        file="decode_worker/admission.py",
        text="            ticket = waiting[0]\n",
        replacement="            ticket = waiting[-1]\n",
        tests=(f"{REMOTE}::test_neither_kind_overtakes_the_other", DECODE_MACHINE),
    ),
    Plant(
        name="head-overtaken-prefill",
        rule="Nobody overtakes the oldest waiting prompt of a prefill worker.",
        file="prefill_worker/scheduler.py",
        text="            self._running.append(self._waiting.pop(0))\n",
        replacement=(
            "            self._running.append(self._waiting.pop(0))\n"
            "        if self._waiting and self._blocks.acquire(self._waiting[-1]):\n"
            "            self._running.append(self._waiting.pop())\n"
        ),
        tests=(f"{PREFILL}::test_a_large_prompt_at_the_head_is_not_overtaken", PREFILL_MACHINE),
    ),
    Plant(
        name="age-forgotten",
        rule="A preempted sequence keeps its age: it comes back before younger ones.",
        file="decode_worker/queues.py",
        text="        insort(self._by_state[state], ticket, key=_AGE)\n",
        replacement="        self._by_state[state].append(ticket)\n",
        tests=(DECODE_MACHINE,),
    ),
    Plant(
        name="oldest-preempted",
        rule="Where pages run out, the youngest sequence gives way.",
        file="decode_worker/scheduler.py",
        text="            youngest = running[-1]\n",
        replacement="            youngest = running[0]\n",
        tests=(
            f"{DECODE}::TestPreemption::test_the_youngest_goes_and_comes_back_with_the_same_tokens",
            DECODE_MACHINE,
        ),
    ),
    Plant(
        name="reserved-preempted",
        rule="A sequence that is being received is not preempted.",
        file="decode_worker/scheduler.py",
        text="            youngest = running[-1]\n",
        replacement="            youngest = max(self._queues.seated(), key=lambda one: one.age)\n",
        tests=(f"{REMOTE}::test_a_reserved_sequence_holds_a_seat_and_is_never_preempted",),
    ),
    Plant(
        name="pages-taken-during-a-step",
        rule="Pages are taken between steps only: the running one may still write into those of a cancelled sequence.",
        file="decode_worker/scheduler.py",
        text="            self._queues.lead(heir, wants)\n        return True\n",
        replacement="            self._queues.lead(heir, wants)\n        self.admit()\n        return True\n",
        tests=(DECODE_MACHINE,),
    ),
    Plant(
        name="preemption-loses-tokens",
        rule="A preempted sequence keeps its tokens.",
        file="decode_worker/scheduler.py",
        text="        self._blocks.release(sequence)\n        sequence.num_preemptions += 1\n",
        replacement=(
            "        self._blocks.release(sequence)\n"
            "        del sequence.token_ids[sequence.num_prompt :]\n"
            "        sequence.num_preemptions += 1\n"
        ),
        tests=(
            f"{DECODE}::TestPreemption::test_the_youngest_goes_and_comes_back_with_the_same_tokens",
            DECODE_MACHINE,
        ),
    ),
    Plant(
        name="preempted-for-ever",
        rule="A sequence is preempted a bounded number of times, then it fails.",
        file="decode_worker/scheduler.py",
        text="        if sequence.num_preemptions == self._max_preemptions:\n",
        replacement="        if False:\n",
        tests=(f"{DECODE}::TestPreemption::test_preemptions_are_bounded",),
    ),
    Plant(
        name="planned-without-pages",
        rule="A plan names nobody who was preempted for it.",
        file="decode_worker/scheduler.py",
        text="            if ticket.state is State.RUNNING and self._find_room(ticket)\n",
        replacement="            if self._find_room(ticket)\n",
        tests=(DECODE_MACHINE,),
    ),
    Plant(
        name="cancelled-in-flight",
        rule="What a step computes for a cancelled sequence is ignored.",
        file="prefill_worker/scheduler.py",
        text="                continue  # released while the step ran\n",
        replacement="                pass\n",
        tests=(PREFILL_MACHINE,),
    ),
    Plant(
        name="budget-overrun",
        rule="A step computes no more tokens than its budget.",
        file="decode_worker/scheduler.py",
        text="            length = min(sequence.num_uncomputed, self._chunk_size, fair_share)\n",
        replacement="            length = min(sequence.num_uncomputed, self._chunk_size)\n",
        tests=(f"{DECODE}::TestBatch::test_decoding_comes_first_and_prompts_share_what_is_left",),
    ),
    Plant(
        name="freed-when-finished",
        rule="A finished prompt keeps its pages until they are released.",
        file="prefill_worker/scheduler.py",
        text="        self._running.remove(sequence)\n        self._held.append(sequence)\n",
        replacement=(
            "        self._running.remove(sequence)\n"
            "        self._held.append(sequence)\n"
            "        self._blocks.release(sequence)\n"
        ),
        tests=(f"{PREFILL}::test_pages_are_held_until_released", PREFILL_MACHINE),
    ),
    Plant(
        name="cancelled-reservation-cached",
        rule="Received pages are cached when the sequence is activated, not before.",
        file="decode_worker/admission.py",
        text="                    self._queues.move(ticket, State.RESERVED)\n",
        replacement=(
            "                    self._queues.move(ticket, State.RESERVED)\n"
            "                    self._blocks.advance(ticket.sequence, ticket.sequence.num_uncomputed)\n"
        ),
        tests=(f"{REMOTE}::test_a_cancelled_reservation_is_not_cached", DECODE_MACHINE),
    ),
    Plant(
        name="sampled-by-batch",
        rule="What is sampled does not depend on the neighbours.",
        file="kernels/sampling/uniform.py",
        text="    state = 0\n",
        replacement="    state = uniform.__dict__['calls'] = uniform.__dict__.get('calls', 0) + 1\n",
        tests=(f"{SEEDS}::test_neighbours_do_not_matter", f"{SEEDS}::test_identical_requests_agree"),
    ),
    Plant(
        name="position-ignored",
        rule="The random number of a token is keyed by its position.",
        file="kernels/sampling/uniform.py",
        text="    for key in (seed, choice, position):\n",
        replacement="    for key in (seed, choice):\n",
        tests=(f"{SEEDS}::test_position_choice_and_seed_all_matter",),
    ),
    Plant(
        name="seed-ignored",
        rule="The random number of a token is keyed by its request's seed.",
        file="kernels/sampling/uniform.py",
        text="    for key in (seed, choice, position):\n",
        replacement="    for key in (choice, position):\n",
        tests=(f"{SEEDS}::test_position_choice_and_seed_all_matter",),
    ),
)
