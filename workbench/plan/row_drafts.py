"""Rows before they have numbers: copied from a replica to its equals, then put in their order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from workbench.arrays import Ints, ints, spans, starts
from workbench.plan.alike import Component
from workbench.plan.lowered import ROUTES, Ends, Rows, Slice
from workbench.plan.paths import Path
from workbench.schedule.action import Action, Pass


class Link(NamedTuple):
    """What rows from one stage to another have in common, whatever the microbatch.

    Args:
        edge, is_backward, width: as in `Rows`.
        token_bytes: of one token.
        paths: of rows with the same content, one after another.
    """

    edge: str
    is_backward: bool
    width: int
    token_bytes: int
    paths: tuple[Path, ...]


class Drafts(NamedTuple):
    """Rows without numbers, in columns of D entries; each stands for as many as its link has paths.

    Args:
        links, actions, contents: that columns name; actions are those of the plan's programs, then others.
        names: of samples in contents, as in `Rows`; the first is empty.
        ticks: [actions of programs + 1] in which they end, see `issue_ticks`.
        link, producer, consumer, content, named: place in these.
        num_tokens: of each path's row.
    """

    links: tuple[Link, ...]
    actions: tuple[Action, ...]
    contents: tuple[tuple[Slice, ...], ...]
    names: tuple[Mapping[int, int], ...]
    ticks: Ints
    link: Ints
    producer: Ints
    consumer: Ints
    content: Ints
    named: Ints
    num_tokens: Ints


def in_issue_order(drafts: Drafts, alike: Sequence[Sequence[Component]]) -> Rows:
    """The rows, by tick of the producer, producer, consumer, in which the order of drafts decides ties.

    Args:
        drafts: of the first component of each set, and of all in none.
        alike: sets of equal components, which have the rows of their first ones by their own names.

    Complexity: O(rows) machine operations, and sorting.
    """
    used, both = np.unique(np.stack((drafts.producer, drafts.consumer)), return_inverse=True)
    all_rows = _Copied(drafts, used, *both.reshape(2, -1))
    for first, *others in alike:
        for other in others:
            all_rows.add(first, other)
    return all_rows.in_order()


class _Copied:
    """Drafts, and the same under other names."""

    def __init__(self, drafts: Drafts, used: Ints, producer: Ints, consumer: Ints) -> None:
        self._drafts, self._ends_of = drafts, (producer, consumer)
        self._actions = [drafts.actions[number] for number in used.tolist()]
        self._stage = ints(action.stage or 0 for action in self._actions)
        in_programs = len(drafts.ticks) - 1
        self._ticks = [drafts.ticks[np.where(used < in_programs, used, in_programs)]]
        paths = [path for link in drafts.links for path in link.paths]
        self._ends = list(dict.fromkeys(Ends(path.source_rank, path.destination_ranks) for path in paths))
        self._paths = paths
        # Of the drafts themselves, then of each copy
        self._columns = [np.stack((np.arange(len(producer)), producer, consumer, np.zeros_like(producer)))]
        self._end_numbers = [np.arange(len(self._ends))]
        self._names: list[Mapping[int, int]] = [{}]

    def add(self, first: Component, other: Component) -> None:
        """The rows of one component as those of its equal."""
        (producer, consumer), (drafts, _, _, _) = self._ends_of, self._columns[0]
        actions, ends = self._actions[: len(self._stage)], self._ends[: len(self._end_numbers[0])]
        is_own = np.isin(self._stage, first.stages)
        of_first = np.flatnonzero(is_own[producer])
        stage = dict(zip(first.stages, other.stages, strict=True))
        rank = dict(zip(first.ranks, other.ranks, strict=True))
        number = len(self._actions) + np.cumsum(is_own) - 1
        self._columns.append(
            np.stack(
                (
                    drafts[of_first],
                    number[producer[of_first]],
                    number[consumer[of_first]],
                    np.full(len(of_first), len(self._names)),
                )
            )
        )
        own = [action for action, is_there in zip(actions, is_own.tolist(), strict=True) if is_there]
        self._actions += [Action(stage[of or 0], kind, microbatch) for of, kind, microbatch in own]
        self._ticks.append(self._ticks[0][is_own])
        is_end = np.array([source in rank for source, _ in ends], dtype=np.bool_)
        self._end_numbers.append(len(self._ends) + np.cumsum(is_end) - 1)
        self._ends += [
            Ends(rank[source], tuple([rank[one] for one in destinations]))
            for source, destinations in ends
            if source in rank
        ]
        self._names.append(dict(zip(first.samples, other.samples, strict=True)))

    def in_order(self) -> Rows:
        """All of them, with numbers."""
        links, edges = self._drafts.links, list(dict.fromkeys(link.edge for link in self._drafts.links))
        ticks = np.concatenate(self._ticks)
        draft, producer, consumer, named = np.concatenate(self._columns, axis=1)
        key = _places(self._actions, ticks)[producer] * len(ticks) + _places(self._actions)[consumer]
        order = np.argsort(key, kind="stable")
        num_paths = ints(len(link.paths) for link in links)
        of_link = self._drafts.link[draft[order]]
        times = num_paths[of_link]
        path, of_row = spans(starts(num_paths)[of_link], times), np.repeat(order, times)
        draft, named, of_link = draft[of_row], named[of_row], np.repeat(of_link, times)
        number_of = {ends: number for number, ends in enumerate(self._ends[: len(self._end_numbers[0])])}
        end_of = ints(number_of[Ends(path.source_rank, path.destination_ranks)] for path in self._paths)
        follows = np.array([path.follows for path in self._paths], dtype=np.bool_)
        num_tokens, number = self._drafts.num_tokens[draft], np.arange(len(path))
        return Rows(
            number=number,
            edge=ints(edges.index(link.edge) for link in links)[of_link],
            route=ints(ROUTES[path.route] for path in self._paths)[path],
            is_backward=np.array([link.is_backward for link in links], dtype=np.bool_)[of_link],
            producer=producer[of_row],
            consumer=consumer[of_row],
            end=np.stack(self._end_numbers)[named, end_of[path]],
            content=self._drafts.content[draft],
            named=named * len(self._drafts.names) + self._drafts.named[draft],
            num_tokens=num_tokens,
            width=ints(link.width for link in links)[of_link],
            num_bytes=num_tokens * ints(link.token_bytes for link in links)[of_link],
            after=np.where(follows[path], number - 1, -1),
            edges=edges,
            actions=self._actions,
            ends=self._ends,
            contents=self._drafts.contents,
            names=_Names(self._drafts.names, self._names),
        )


class _Names(Mapping[int, Mapping[int, int]]):
    """For each copy, names of samples in contents, by what the copy calls those; made when one is asked for.

    Args:
        of_contents: sample -> what the drafts call it; empty: as it is.
        of_copies: what the drafts call it -> what the copy does; empty: as it is.
    """

    def __init__(
        self, of_contents: Sequence[Mapping[int, int]], of_copies: Sequence[Mapping[int, int]]
    ) -> None:
        self._of_contents, self._of_copies = of_contents, of_copies

    def __len__(self) -> int:
        return len(self._of_contents) * len(self._of_copies)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, number: int) -> Mapping[int, int]:
        copy, content = divmod(number, len(self._of_contents))
        return _then(self._of_contents[content], self._of_copies[copy])


def _then(first: Mapping[int, int], other: Mapping[int, int]) -> Mapping[int, int]:
    """What names become that are renamed; an empty one leaves all as it is."""
    return {sample: other[name] for sample, name in first.items()} if first and other else first or other


_KINDS = {kind: place for place, kind in enumerate(sorted(Pass))}


def _places(actions: Sequence[Action], *first: Ints) -> Ints:
    """[actions] place of each when they stand in order, by what is given first."""
    columns = (
        ints(action.microbatch or 0 for action in actions),
        ints(_KINDS[action.kind] for action in actions),
        ints(action.stage or 0 for action in actions),
    )
    order = np.lexsort((*columns, *first))
    found = np.empty_like(order)
    found[order] = np.arange(len(order))
    return found
