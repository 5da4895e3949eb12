"""A trainer that takes batches from a preprocessing server and records their content, one line a batch.

Run:     python -m experiments.chaos.trainer ADDRESS NOTES BATCHES TIMEOUT_S
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from runtime.preprocess.loader import Batch, ServedLoader, Subscription
from workbench.termination import Ended, ending_by_signal

STEP_S = 0.03
NAME = "chaos"


def noted(batch: Batch) -> str:
    """A batch's position, examples and sum of contents, independent of order."""
    content = hashlib.sha256()
    for example in sorted(batch.examples, key=lambda example_of_batch: example_of_batch.id):
        content.update(b"".join(text.tobytes() for text in example.texts))
        for image in example.images:
            content.update(image.values.tobytes())
    ids = sorted(example.id for example in batch.examples)
    return json.dumps([batch.position, ids, content.hexdigest()])


def main(arguments: Sequence[str]) -> int:
    """Continue after the last line of the notes, up to a number of batches."""
    address, notes, batches, timeout_s = arguments[0], Path(arguments[1]), int(arguments[2]), arguments[3]
    done = len(notes.read_text().splitlines()) if notes.exists() else 0
    try:
        with ending_by_signal():
            loader = ServedLoader(
                Subscription(address=address, name=NAME, timeout_s=float(timeout_s)), start=done
            )
            try:
                with notes.open("a") as file:
                    for _ in range(done, batches):
                        file.write(noted(loader.next()) + "\n")
                        file.flush()
                        os.fsync(file.fileno())
                        time.sleep(STEP_S)
                loader.finish()
            finally:
                loader.close()
    except ValueError as error:
        sys.stderr.write(f"trainer: error: {error}\n")
        return 2
    except Ended as ended:
        sys.stderr.write(f"trainer: ended by {ended.name}\n")
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
