"""Draws a round's tree as text, with the accepted path marked."""

from collections.abc import Callable

from ddtree_jax import RoundTrace


def draw_tree(trace: RoundTrace, name_of: Callable[[int], str]) -> str:
    """One line a node, children in the order in which they were taken; ``*`` marks what the target accepted.

    ::

        * 'def'
        |-- * ' fib'
        |   `-- ' add'
        `-- ' main'
    """
    children: dict[int, list[int]] = {node: [] for node in range(len(trace.token_ids))}
    for node, parent in enumerate(trace.parents):
        if node > 0:
            children[parent].append(node)

    def lines(node: int, first: str, rest: str) -> list[str]:
        mark = "* " if node in trace.accepted else ""
        drawn = [f"{first}{mark}{name_of(trace.token_ids[node])}"]
        for child in children[node]:
            is_last = child == children[node][-1]
            branch, below = ("`-- ", "    ") if is_last else ("|-- ", "|   ")
            drawn += lines(child, rest + branch, rest + below)
        return drawn

    return "\n".join(lines(0, "", ""))
