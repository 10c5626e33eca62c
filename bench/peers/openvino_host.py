"""Runs OpenVINO GenAI in this process, which is one of its own environment: it imports nothing of ours.

Called as `python openvino_host.py convert MODEL_DIR TARGET_DIR`, or as `... serve TARGET_DIR NUM_BATCHED_TOKENS`, which
reads one workload as a line of JSON, runs it, writes the times of its tokens as a line of JSON, and so on to the end of
its input.
"""

import json
import sys
import time
from importlib import import_module
from typing import Any

KV_CACHE_GB = 3


def main() -> int:
    """Do what the command line says."""
    match sys.argv[1:]:
        case ["convert", source, target]:
            _convert(source, target)
        case ["serve", folder, num_batched_tokens]:
            _serve(folder, int(num_batched_tokens))
        case other:
            raise SystemExit(f"convert or serve, not {other}")
    return 0


def _convert(source: str, target: str) -> None:
    """Write the model in OpenVINO's format, with its weights as they are, and its tokenizer."""
    openvino, tokenizers = import_module("openvino"), import_module("openvino_tokenizers")
    exporters, transformers = import_module("optimum.exporters.openvino"), import_module("transformers")
    task = "text-generation-with-past"
    exporters.main_export(source, target, task=task, library_name="transformers", device="cpu", stateful=True)
    both = tokenizers.convert_tokenizer(transformers.AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    for model, name in zip(both, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(model, f"{target}/openvino_{name}.xml")


def _serve(folder: str, num_batched_tokens: int) -> None:
    openvino_genai = import_module("openvino_genai")
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = KV_CACHE_GB
    scheduling.max_num_batched_tokens = num_batched_tokens
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = False
    numbers = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduling, "CPU", numbers)
    _say("ready")
    for line in sys.stdin:
        asks = json.loads(line)
        _say(_Run(pipeline, asks["asks"], asks["seats"]).times())


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class _Run:
    """One workload: requests enter when they have arrived and a seat is free; then steps, until all are done."""

    def __init__(self, pipeline: Any, asks: list[dict[str, Any]], seats: int | None) -> None:  # noqa: ANN401
        self._pipeline = pipeline
        self._asks = asks
        self._seats = seats or len(asks)
        self._running: dict[int, Any] = {}
        self._results: list[dict[str, Any]] = []

    def times(self) -> list[dict[str, Any]]:
        """Return of each request when it arrived, when each token came, and how many came."""
        self._start_s = time.monotonic()
        while len(self._results) < len(self._asks) or self._running:
            self._admit()
            if self._running:
                self._pipeline.step()
                self._collect()
            else:
                time.sleep(0.0005)
        return self._results

    def _admit(self) -> None:
        numpy, openvino, openvino_genai = map(import_module, ("numpy", "openvino", "openvino_genai"))
        while len(self._results) < len(self._asks) and len(self._running) < self._seats:
            ask, index = self._asks[len(self._results)], len(self._results)
            if time.monotonic() < self._start_s + ask["at_s"]:
                return
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = ask["num_tokens"], True, False
            arrived_s = self._start_s + ask["at_s"] if ask["at_s"] else time.monotonic()
            prompt = openvino.Tensor(numpy.array([ask["prompt"]], dtype=numpy.int64))
            self._running[index] = self._pipeline.add_request(index, prompt, config)
            self._results.append({"arrived_s": arrived_s, "times_s": [], "num_tokens": 0})

    def _collect(self) -> None:
        now_s = time.monotonic()
        for index, handle in list(self._running.items()):
            result = self._results[index]
            while handle.can_read():
                result["times_s"].append(now_s)
                result["num_tokens"] += sum(len(output.generated_ids) for output in handle.read().values())
            if result["num_tokens"] >= self._asks[index]["num_tokens"]:
                del self._running[index]


if __name__ == "__main__":
    sys.exit(main())
