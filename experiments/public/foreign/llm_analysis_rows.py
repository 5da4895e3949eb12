"""Seconds of rows by llm-analysis: a JSON list of arguments on stdin, one of seconds or errors on stdout.

Runs in an environment with `pip install llm-analysis`, which pins an older transformers. Settings are the
package's own defaults: its efficiencies, its latencies.
"""

import contextlib
import io
import json
import sys
from typing import Any

from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig


def seconds(row: dict[str, Any]) -> float:
    """Seconds of one iteration."""
    analysis = LLMAnalysis(
        ModelConfig(**row["model"]),
        GPUConfig(**row["gpu"]),
        DtypeConfig(**row["dtype"]),
        ParallelismConfig(**row["parallelism"]),
    )
    run = row["run"] | {
        "ds_zero": DSZeRO(row["run"]["ds_zero"]),
        "activation_recomputation": ActivationRecomputation(row["run"]["activation_recomputation"]),
    }
    return float(analysis.training(**run)["latency_per_iter"])


def main() -> None:
    answers: list[float | str] = []
    for row in json.load(sys.stdin):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                answers.append(seconds(row))
        except (AssertionError, ValueError, ZeroDivisionError, TypeError) as error:
            answers.append(f"{type(error).__name__}: {error}")
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
