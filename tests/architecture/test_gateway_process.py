"""What a gateway process weighs: the CPU time of its import, and its memory with the bundled model's tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

from common.messages.codec import encode
from common.messages.ids import Fingerprint, ModelName
from common.model.card import build_card
from common.model.checkpoint import open_checkpoint
from common.model.locate import locate_model
from tests.support.source_tree import ROOT

MAX_IMPORT_S = 5.0
"""Processor time, so that waiting for other processes does not count. The README promises 1.5 s on an idle machine."""

MAX_RSS_BYTES = 150 * 10**6

SCRIPT = """
import json, sys, time
started = time.process_time()
import gateway.app
import_s = time.process_time() - started
import gateway.process
from pathlib import Path
from common.messages.codec import decode
from common.messages.registry import ModelCard
from gateway.tokenizer import ModelTokenizer
import psutil
tokenizer = ModelTokenizer(decode(Path(sys.argv[1]).read_bytes(), ModelCard))
ids = tokenizer.encode_text("hello, world")
tensor_stack = sorted({"torch", "triton", "transformers", "numpy"} & set(sys.modules))
print(json.dumps([import_s, psutil.Process().memory_info().rss, len(ids), tensor_stack]))
"""


def test_a_gateway_is_light(tmp_path: Path) -> None:
    card = build_card(
        open_checkpoint(locate_model("smollm2")),
        model=ModelName("smollm2"),
        fingerprint=Fingerprint("f" * 64),
        max_context=8192,
        created=1_700_000_000,
    )
    file = tmp_path / "card"
    file.write_bytes(encode(card))
    command = [sys.executable, "-c", SCRIPT, str(file)]
    outcome = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False, timeout=100)
    assert outcome.returncode == 0, outcome.stderr
    import_s, rss_bytes, num_ids, tensor_stack = json.loads(outcome.stdout)
    assert tensor_stack == []
    assert import_s < MAX_IMPORT_S
    assert rss_bytes < MAX_RSS_BYTES
    assert num_ids == 3
