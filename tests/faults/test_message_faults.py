"""The fault matrix, rows of messages: at each stage what is said comes twice, late, out of order, or never.

All stages at once: each of five requests has one message of its own touched, that of its stage.
"""

from collections.abc import Callable
from functools import partial

import pytest

from proto import worker_pb2 as pb
from tests.support.fault_cells import Scene
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_messages import (
    Utterance,
    last_pages_behind_commit,
    said_by_decode,
    said_by_gateway,
    said_by_prefill,
)
from tests.support.fault_rules import Delayed, Duplicated, Faulty, Lost, Reordered
from tests.support.fault_stages import ALL_STAGES, IsMine, Stage, Undisturbed, about
from tests.support.fault_table import Table
from tests.support.fault_talk import Talk

pytestmark = [
    pytest.mark.faults,
    pytest.mark.redis,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("one_prefill_worker"),
]

BOUND_S = 20.0
REORDERED = "message reordered"

FAULTS: dict[str, Callable[[Utterance], Faulty]] = {
    "message duplicated": lambda said: Duplicated(said.matcher),
    "message delayed": lambda said: Delayed(said.matcher),
    REORDERED: lambda said: Reordered(said.matcher, next_one=said.next_one, reply=said.reply),
    "message lost": lambda said: Lost(said.matcher),
}
RENEWED = (Stage.PREFILLING, Stage.TRANSFERRING, Stage.COMMITTING)
"""Stages at which all that a decode worker says is the renewal of its lease, once a second."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_said_by_prefill_workers(cluster: FaultCluster, plain: Undisturbed, table: Table, fault: str) -> None:
    talk = Talk(cluster, plain, table, fault, "prefill", BOUND_S)

    def disturbed(stage: Stage, is_mine: IsMine) -> Faulty:
        if stage is Stage.COMMITTING and fault == REORDERED:
            return FAULTS[fault](last_pages_behind_commit(is_mine, 3))
        return FAULTS[fault](said_by_prefill(stage, is_mine))

    for stage in ALL_STAGES:
        talk.touch(stage, partial(disturbed, stage))
    await talk.run()


@pytest.mark.parametrize("fault", FAULTS)
async def test_said_by_decode_workers(cluster: FaultCluster, plain: Undisturbed, table: Table, fault: str) -> None:
    talk = Talk(cluster, plain, table, fault, "decode", BOUND_S)
    renewed = pb.RenewReply(epoch=await cluster.epoch_of("prefill-0")).SerializeToString()

    def disturbed(stage: Stage, is_mine: IsMine) -> Faulty:
        return FAULTS[fault](said_by_decode(stage, is_mine, renewed))

    for stage in ALL_STAGES:
        talk.touch(stage, partial(disturbed, stage), is_held=stage in RENEWED)
    await talk.run()


@pytest.mark.parametrize("fault", FAULTS)
async def test_said_by_gateways(cluster: FaultCluster, plain: Undisturbed, table: Table, fault: str) -> None:
    """At each stage the client leaves; the cancel of its gateway is touched. What is held is let go all the same."""
    scene = Scene(cluster, plain, table, fault, "gateway", BOUND_S, others_at="gateway-1")
    await scene.stage(ALL_STAGES)
    rules = [FAULTS[fault](said_by_gateway(about(cluster, victim.ask))) for victim in scene.victims]
    cluster.rules.add(*rules)

    def leave() -> None:
        for victim in scene.victims:
            victim.ask.hang_up()

    await scene.strike(leave)
    await scene.let_go()
    num_touched = sum(rule.num_acted for rule in rules)
    assert num_touched >= (len(rules) // 2 if fault == REORDERED else len(rules))  # of two, one has overtaken the other
