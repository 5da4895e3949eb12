"""One search over layouts, order, grouping, tokens and memory together, judged by a simulator."""
