"""Which sequences a decode worker runs in the next step. Pure; owned by the engine thread.

The life of a sequence:

1. `add` puts it into one queue ordered by age (`arrival`), saying where it wants to be prefilled.
2. `admit` takes from the head of that queue while a seat and pages for all its tokens are there: the cached prefix is
   pinned, the missing pages are taken. A local sequence then runs; a remote one is *reserved* until its pages have
   come. Nobody overtakes the head, so nobody waits for ever. One that runs alone is admitted when nobody else runs or
   is reserved, and nobody else while it runs.
3. A reserved sequence becomes a running one by `activate` (pages and first token have come) or by `fall_back` (it
   computes its prompt here). `conclude` ends it where the first token already is the last one.
4. `plan` gives every decoding sequence one token and prompts a fair share of what is left. Where pages run out, the
   youngest running sequence is preempted: it keeps its tokens, goes back to the queue and computes them again later.
5. `settle` appends the sampled tokens and tells about each; what is over has released its pages.

Of the choices of one request the first one leads: it alone is prefilled. The others *follow*, without pages and in no
line, until its prompt is computed; then they wait at the request's age, and share the prompt's full blocks when they
are admitted. A block that they write into is copied from the leader while it has it, else computed again. Where the
leader is over before that, the next one leads. A choice that fails ends them all.

The engine calls, in this order: commands (`add`, `activate`, `fall_back`, `conclude`, `cancel`), `admit`, `plan`, run,
`settle`. An empty plan is settled, too: something may have failed while planning. Commands run between `settle` and
`admit`; only `cancel` may also come between run and `settle`, because pages are taken again by `admit` and `plan` alone
(the cancelled sequence's part of the result is ignored).
"""

from collections.abc import Callable, Iterable

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.errors import InvalidSetting
from common.messages.ids import BlockId
from common.scheduling.blocks import SequenceBlocks
from common.scheduling.emission import Emission, FailureCode
from common.scheduling.plan import Chunk, StepPlan, StepResult
from common.scheduling.sequence import PlacementKey, Sequence, SequenceKey
from decode_worker.admission import Admission, Admitted
from decode_worker.demand import Demand, demand_of
from decode_worker.first_token import FirstToken
from decode_worker.queues import Queues
from decode_worker.teller import Teller
from decode_worker.ticket import Choices, Intake, State, Ticket

MAX_PREEMPTIONS = 8
"""Each preemption asks for more room before the next admission, so that a sequence rarely comes near this."""


class DecodeScheduler:
    """Continuous batching over one pool. `max_context` and the pool's capacity end a sequence with `LENGTH`.

    `token_budget` bounds the tokens of one step, `chunk_size` one sequence's share of it, `max_sequences` the running
    and reserved sequences together.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixCache,
        *,
        block_size: int,
        max_sequences: int,
        token_budget: int,
        chunk_size: int,
        max_context: int,
        max_preemptions: int = MAX_PREEMPTIONS,
        prompt_allowance: Callable[[int, int, int], int] | None = None,
    ) -> None:
        """`prompt_allowance` bounds the tokens of prompts in a step by its decoding sequences, their pairs and the
        longest context among the prompts."""
        if token_budget < max_sequences:
            raise InvalidSetting("token_budget", token_budget, f"must be at least max_sequences ({max_sequences})")
        self._blocks = SequenceBlocks(pool, prefix, block_size)
        self._queues = Queues()
        self._admission = Admission(self._blocks, self._queues, max_sequences, max_context)
        self._max_sequences = max_sequences
        self._token_budget = token_budget
        self._chunk_size = chunk_size
        self._teller = Teller(self._blocks, self._queues, min(max_context, self._blocks.capacity + 1))
        self._max_preemptions = max_preemptions
        self._prompt_allowance = prompt_allowance
        self.num_preemptions = 0
        """Preemptions so far."""
        self._failed: dict[Choices, Emission] = {}
        """Decided while planning, told by `settle`."""

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Sequences without pages: new ones, preempted ones, and choices that follow one whose prompt is not there."""
        return len(self._queues.waiting) + len(self._queues.following)

    @property
    def num_reserved(self) -> int:
        """Sequences whose prompt is computed elsewhere."""
        return len(self._queues.reserved)

    @property
    def num_promised(self) -> int:
        """Free pages that are left for choices whose prompt is being computed."""
        return self._admission.num_promised

    @property
    def demand(self) -> Demand:
        """What is to be computed, here and for us elsewhere."""
        return demand_of(self._queues)

    @property
    def is_exclusive(self) -> bool:
        """Whether a sequence that runs alone is here, waiting or running."""
        return any(ticket.sequence.runs_alone for ticket in self._queues.tickets())

    def sequence(self, key: SequenceKey) -> Sequence | None:
        """Return the sequence of that key, or None when it is over or was never here."""
        ticket = self._queues.find(key)
        return ticket.sequence if ticket else None

    def unstarted(self) -> list[SequenceKey]:
        """Return a sequence of each placement of which none has run here, oldest first: they wait for room, or for a
        prefill elsewhere."""
        return [choices.leader.sequence.key for choices in self._queues.placements() if not choices.has_run]

    def displaced_by(self, suspect: SequenceKey) -> list[SequenceKey]:
        """Return a sequence of each placement that must not wait for the end of a suspect, which may take the process
        with it, oldest first.

        Those of which every choice runs go on, and the suspect waits for them. If another one that runs alone is here
        already, it is the suspect itself that goes.
        """
        own = self._queues.choices(suspect.of_placement)
        others = [choices for choices in self._queues.placements() if choices is not own]
        if any(other.leader.sequence.runs_alone for other in others):
            return [suspect]
        return [other.tickets[0].sequence.key for other in others if not _all_run(other)]

    def add(self, leader: Sequence, wants: Intake = Intake.LOCAL, followers: Iterable[Sequence] = ()) -> None:
        """Queue a request's choices by its age: new ones without pages, each with at least one token left to generate.

        Raises `DoesNotFit` if they could never compute their next tokens here, however long they wait.
        """
        choices = (leader, *followers)
        assert len(choices) <= self._max_sequences, f"{leader.key} and its followers can never have seats"
        assert self._queues.choices(leader.key.of_placement) is None, f"{leader.key} is here already"
        for one in choices:
            assert 0 <= one.num_generated < one.sampling.max_tokens, f"{one.key} has nothing to generate"
        assert wants is Intake.LOCAL or not leader.runs_alone, f"{leader.key} must not take others along"
        self._admission.check(choices)
        self._queues.enter(leader, wants, choices[1:])

    def admit(self) -> Admitted:
        """Admit from the head of the queue while there is room."""
        return self._admission.admit()

    def activate(self, key: SequenceKey, first: FirstToken) -> Emission | None:
        """Let a reserved sequence run: all its pages are here, verified, and its first token.

        The token may end the sequence at once. None, and nothing changes, if no such sequence is reserved (any more).
        """
        ticket = self._reserved(key)
        if ticket is None:
            return None
        sequence = ticket.sequence
        if sequence.block_ids:
            self._blocks.advance(sequence, sequence.num_uncomputed)
        self._queues.move(ticket, State.RUNNING)
        self._call_followers(ticket)
        return self._teller.append_first(ticket, first)

    def conclude(self, key: SequenceKey, first: FirstToken) -> Emission | None:
        """End a reserved sequence whose first token is its last, whether or not its pages are here.

        None, and nothing changes, if the token does not end it, if others need its pages, or if no such sequence is
        reserved (any more).
        """
        ticket = self._reserved(key)
        if ticket is None or ticket.choices.followers or self._teller.finish(ticket.sequence, first.token) is None:
            return None
        return self._teller.append_first(ticket, first)

    def fall_back(self, key: SequenceKey, *, alone: bool = False) -> bool:
        """Compute the prompt of a reserved or waiting remote sequence here; False if there is none of that key.

        It keeps its pages. Call it when nothing writes into them any more. If `alone`, it gives them back and waits
        until it, and the other choices of its request, can run beside nobody.
        """
        ticket = self._queues.find(key)
        if ticket is None or ticket.intake is Intake.LOCAL or ticket.state is State.RUNNING:
            return False
        sequence = ticket.sequence
        ticket.intake = Intake.LOCAL
        if alone:
            for choice in ticket.choices.tickets:
                choice.sequence.runs_alone = True
            self._blocks.release(sequence)
        if ticket.state is State.RESERVED:
            # Reserved for one token alone, it has no pages and must wait for some.
            self._queues.move(ticket, State.RUNNING if sequence.block_ids else State.WAITING)
        return True

    def cancel(self, key: SequenceKey) -> bool:
        """Drop a sequence in any state and release its pages; False if it is over or was never here. Idempotent.

        If others follow it, the next one leads. It computes the prompt here if a prefill elsewhere was under way.
        """
        ticket = self._queues.find(key)
        if ticket is None:
            return False
        wants = ticket.intake if ticket.state is State.WAITING else Intake.LOCAL
        choices = ticket.choices
        self._teller.leave(ticket)
        if choices.leader is ticket and choices.followers:
            heir = choices.followers[0]
            heir.sequence.sampling = ticket.sequence.sampling  # it may ask for logprobs of the prompt
            self._queues.lead(heir, wants)
        return True

    def cancel_all(self, placement: PlacementKey) -> None:
        """Drop whatever is left of a placement. Idempotent."""
        choices = self._queues.choices(placement)
        if choices is not None:
            self._end(choices)

    def fail(self, key: SequenceKey, failure: FailureCode) -> Emission | None:
        """End a placement because one of its sequences has failed elsewhere; None if that one is over."""
        ticket = self._queues.find(key)
        return None if ticket is None else self._fail_all(ticket, failure)

    def plan(self) -> StepPlan:
        """Decide the next step: one token per decoding sequence, then prompt chunks, within the token budget."""
        decoding: list[Ticket] = []
        catching_up: list[Ticket] = []
        for ticket in self._queues.running:
            (decoding if ticket.sequence.num_uncomputed == 1 else catching_up).append(ticket)
        chunks = [
            Chunk(ticket.sequence, ticket.sequence.num_computed, 1, samples=True)
            for ticket in decoding
            if ticket.state is State.RUNNING and self._find_room(ticket)
        ]
        chunks += self._prompt_chunks(catching_up, self._prompt_budget(chunks, catching_up))
        copies = self._admission.take_copies()
        assert chunks or not copies, "pages to copy, and no step to copy them in"
        return StepPlan(tuple(chunks), copies)

    def settle(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Close a step: record what is computed, append sampled tokens, end what is over."""
        emissions: list[Emission] = []
        for choices, emission in self._failed.items():
            emissions.append(emission)
            self._end(choices)
        self._failed.clear()
        for chunk in plan.chunks:
            sequence = chunk.sequence
            ticket = self._queues.find(sequence.key)
            if ticket is None or ticket.sequence is not sequence:
                continue  # cancelled while the step ran
            failure = _failure(sequence.key, result)
            if failure is not None:
                emissions.append(self._fail_all(ticket, failure))
                continue
            self._blocks.advance(sequence, chunk.length)
            _note_prompt(chunk, result)
            self._call_followers(ticket)
            if chunk.samples:
                emissions.append(
                    self._teller.append(ticket, result.tokens[sequence.key], result.logprobs.get(sequence.key))
                )
        return emissions

    def violations(self, copies: Iterable[Iterable[BlockId]] = ()) -> list[str]:
        """Return what is wrong with the accounts of the blocks and the queues, one text each. For idle times.

        `copies` hold the blocks that receivers own beside the sequences.
        """
        sequences = [ticket.sequence for ticket in self._queues.tickets()]
        return [*self._blocks.violations(sequences, copies), *self._queues.violations()]

    def _reserved(self, key: SequenceKey) -> Ticket | None:
        ticket = self._queues.find(key)
        return ticket if ticket and ticket.state is State.RESERVED else None

    def _call_followers(self, leader: Ticket) -> None:
        """Let those that follow wait for seats of their own, once the prompt is computed."""
        sequence, choices = leader.sequence, leader.choices
        if len(choices.tickets) == 1 or choices.leader is not leader or sequence.num_computed < sequence.num_prompt:
            return
        for follower in choices.followers:
            self._queues.move(follower, State.WAITING)

    def _find_room(self, ticket: Ticket) -> bool:
        """Take the page that the next token needs, from younger sequences if need be.

        The youngest one waits with what it has instead of preempting itself, which would only repeat its work.
        """
        running = self._queues.running
        while not self._blocks.grow(ticket.sequence):
            youngest = running[-1]
            if youngest is ticket:
                return False
            self._preempt(youngest)
        return True

    def _prompt_budget(self, decoding: list[Chunk], prompts: list[Ticket]) -> int:
        """Return how many tokens of prompts are computed beside these."""
        budget = self._token_budget - len(decoding)
        if self._prompt_allowance is None or not prompts:
            return budget
        num_context = max(ticket.sequence.num_computed for ticket in prompts)
        num_pairs = sum(chunk.num_pairs for chunk in decoding)
        return min(budget, self._prompt_allowance(len(decoding), num_pairs, num_context))

    def _prompt_chunks(self, tickets: Iterable[Ticket], budget: int) -> list[Chunk]:
        """Share the budget fairly: nobody gets more than another who could use it. Where it is smaller than the number
        of prompts, the shortest go first."""
        waiting = [ticket.sequence for ticket in tickets if ticket.state is State.RUNNING]
        waiting.sort(key=lambda sequence: sequence.num_uncomputed)
        chunks: list[Chunk] = []
        for position, sequence in enumerate(waiting):
            if not budget:
                break
            fair_share = max(1, budget // (len(waiting) - position))
            length = min(sequence.num_uncomputed, self._chunk_size, fair_share)
            samples = length == sequence.num_uncomputed
            chunks.append(Chunk(sequence, sequence.num_computed, length, samples))
            budget -= length
        return chunks

    def _preempt(self, ticket: Ticket) -> None:
        sequence = ticket.sequence
        if sequence.num_preemptions == self._max_preemptions:
            # The other choices end when the step is settled: they may stand in its plan.
            emission = self._teller.fail(ticket, FailureCode.PREEMPTED)
            self._failed.setdefault(ticket.choices, emission)
            return
        self._blocks.release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        ticket.intake = Intake.LOCAL
        self._queues.move(ticket, State.WAITING)

    def _fail_all(self, ticket: Ticket, failure: FailureCode) -> Emission:
        if failure is FailureCode.INVALID_LOGITS:
            for choice in ticket.choices.tickets:
                self._blocks.forget(choice.sequence)
        emission = self._teller.fail(ticket, failure)
        self._end(ticket.choices)
        return emission

    def _end(self, choices: Choices) -> None:
        for ticket in list(choices.tickets):
            self._teller.leave(ticket)


def _all_run(choices: Choices) -> bool:
    return all(ticket.state is State.RUNNING for ticket in choices.tickets)


def _failure(key: SequenceKey, result: StepResult) -> FailureCode | None:
    if key in result.invalid:
        return FailureCode.INVALID_LOGITS
    return FailureCode.GRAMMAR_VIOLATED if key in result.violated else None


def _note_prompt(chunk: Chunk, result: StepResult) -> None:
    """Keep the logprobs of the prompt's tokens behind the chunk's; what a preempted sequence computes again replaces
    what it had."""
    new = result.prompt_logprobs.get(chunk.sequence.key)
    if new is not None:
        chunk.sequence.prompt_logprobs[chunk.start :] = new
