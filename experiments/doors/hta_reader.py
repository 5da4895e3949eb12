"""Reads a folder of traces with HolisticTraceAnalysis; runs where that is installed."""

import json
import logging
import sys

from hta.trace_analysis import TraceAnalysis


def main() -> int:
    """Print temporal breakdown and overlap of every rank, as one JSON object."""
    logging.disable(logging.CRITICAL)
    analysis = TraceAnalysis(trace_dir=sys.argv[1])
    times = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    overlap = analysis.get_comm_comp_overlap(visualize=False).to_dict("records")
    print(json.dumps({"breakdown": times, "overlap": overlap}, default=float))
    return 0


if __name__ == "__main__":
    sys.exit(main())
