"""Rows before they are numbered: copied from a replica to its equals, then sorted into issue order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from workbench.arrays import Ints, ints, spans, starts
from workbench.plan.alike import Component
from workbench.plan.lowered import ROUTES, Ends, Rows, Slice
from workbench.plan.paths import Path
from workbench.schedule.action import Action, Pass, with_stages


class Link(NamedTuple):
    """What rows between two stages have in common, whatever the microbatch.

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
    """Rows without numbers, in columns of D entries; each makes one row per path of its link.

    Args:
        links, actions, contents: tables that columns index; actions are those of the programs, then others.
        names: renamings of samples in contents, as in `Rows`; the first is empty.
        ticks: [actions of programs + 1] in which they end, see `issue_ticks`.
        link, producer, consumer, content, named: indices into these tables.
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
    """Return the rows by tick of the producer, producer and consumer; ties keep the order of drafts.

    Args:
        drafts: of the first component of each set; of the whole plan where there are no sets.
        alike: sets of equal components, which get renamed copies of the first one's rows.

    Complexity: O(rows) machine operations, and sorting.
    """
    used, both = np.unique(np.stack((drafts.producer, drafts.consumer)), return_inverse=True)
    all_rows = _Copied(drafts, used, *both.reshape(2, -1))
    for first, *others in alike:
        for other in others:
            all_rows.add(first, other)
    return all_rows.in_order()


class _Copied:
    """Drafts and their copies under other names."""

    def __init__(self, drafts: Drafts, used: Ints, producer: Ints, consumer: Ints) -> None:
        self._drafts, self._ends_of = drafts, (producer, consumer)
        self._actions = [drafts.actions[number] for number in used.tolist()]
        self._stage = ints(action.stage or 0 for action in self._actions)
        in_programs = len(drafts.ticks) - 1
        self._ticks = [drafts.ticks[np.where(used < in_programs, used, in_programs)]]
        self._paths = [path for link in drafts.links for path in link.paths]
        ends = [Ends(path.source_rank, path.destination_ranks) for path in self._paths]
        number_of = {each: number for number, each in enumerate(dict.fromkeys(ends))}
        self._ends, self._end_of_path = list(number_of), ints(map(number_of.__getitem__, ends))
        # One entry for the drafts themselves, then one for each copy
        self._columns = [np.stack((np.arange(len(producer)), producer, consumer, np.zeros_like(producer)))]
        self._end_numbers = [np.arange(len(self._ends))]
        self._names: list[Mapping[int, int]] = [{}]

    def add(self, first: Component, other: Component) -> None:
        """Add the rows of one component as those of its equal."""
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
        own_actions = [
            action for action, is_in_first in zip(actions, is_own.tolist(), strict=True) if is_in_first
        ]
        self._actions += with_stages(own_actions, lambda old: stage[old or 0])
        self._ticks.append(self._ticks[0][is_own])
        is_end = np.array([source in rank for source, _ in ends], dtype=np.bool_)
        self._end_numbers.append(len(self._ends) + np.cumsum(is_end) - 1)
        self._ends += [
            Ends(rank[source], tuple([rank[destination] for destination in destinations]))
            for source, destinations in ends
            if source in rank
        ]
        self._names.append(dict(zip(first.samples, other.samples, strict=True)))

    def in_order(self) -> Rows:
        """Return all rows, numbered."""
        links, edges = self._drafts.links, list(dict.fromkeys(link.edge for link in self._drafts.links))
        ticks = np.concatenate(self._ticks)
        draft, producer, consumer, named = np.concatenate(self._columns, axis=1)
        names = _names(self._actions)
        producer_position = _sorted_positions(*names, ticks)
        key = producer_position[producer] * len(ticks) + _sorted_positions(*names)[consumer]
        order = np.argsort(key, kind="stable")
        num_paths = ints(len(link.paths) for link in links)
        of_link = self._drafts.link[draft[order]]
        times = num_paths[of_link]
        path, of_row = spans(starts(num_paths)[of_link], times), np.repeat(order, times)
        draft, named, of_link = draft[of_row], named[of_row], np.repeat(of_link, times)
        follows = np.array([path.follows for path in self._paths], dtype=np.bool_)
        num_tokens, number = self._drafts.num_tokens[draft], np.arange(len(path))
        return Rows(
            number=number,
            edge=ints(edges.index(link.edge) for link in links)[of_link],
            route=ints(ROUTES[path.route] for path in self._paths)[path],
            is_backward=np.array([link.is_backward for link in links], dtype=np.bool_)[of_link],
            producer=producer[of_row],
            consumer=consumer[of_row],
            end=np.stack(self._end_numbers)[named, self._end_of_path[path]],
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
    """Renamings of samples in contents, for each copy; each is composed when asked for.

    Args:
        of_contents: sample -> its name in the drafts; empty: unchanged.
        of_copies: name in the drafts -> name in the copy; empty: unchanged.
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
        return _composed(self._of_contents[content], self._of_copies[copy])


def _composed(inner: Mapping[int, int], outer: Mapping[int, int]) -> Mapping[int, int]:
    """Compose two renamings; an empty one changes nothing."""
    return {sample: outer[name] for sample, name in inner.items()} if inner and outer else inner or outer


_KINDS = {kind: index for index, kind in enumerate(sorted(Pass))}


def _names(actions: Sequence[Action]) -> tuple[Ints, Ints, Ints]:
    """[actions] microbatch, kind and stage of each: the last is the first that actions are sorted by."""
    stages, kinds, microbatches = zip(*actions, strict=True) if actions else ((), (), ())
    return (
        ints([microbatch or 0 for microbatch in microbatches]),
        ints(map(_KINDS.__getitem__, kinds)),
        ints([stage or 0 for stage in stages]),
    )


def _sorted_positions(*keys: Ints) -> Ints:
    """[entries] position of each in ascending order; the last key is the first to sort by."""
    order = np.lexsort(keys)
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order))
    return positions
