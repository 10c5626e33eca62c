"""Nobody is admitted into the room that the running sequences need for their next step."""

from tests.support.scripted_decode import ScriptedDecode
from tests.support.sequences import sequence


def test_a_newcomer_waits_for_room_beside_the_next_step() -> None:
    worker = ScriptedDecode(2, 2)
    runner = worker.add(sequence("runner", [1, 1], arrival=0, max_tokens=2))
    worker.step()  # its prompt fills one block, its next token needs the other one
    newcomer = worker.add(sequence("newcomer", [2], arrival=1, max_tokens=1))
    worker.step()
    assert (runner.num_preemptions, newcomer.num_preemptions) == (0, 0)
    assert len(worker.output("runner")) == 2
    assert not worker.output("newcomer")
    worker.run_until_idle()
    assert len(worker.output("newcomer")) == 1
    assert newcomer.num_preemptions == 0
