"""Containers are walked and rebuilt as the types that they are; without a change they stay themselves."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakable_cuda_graphs.sequence.pytree import children, leaves, rebuilt, shape


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Box:
    inside: Any
    label: str = "box"


@dataclasses.dataclass(frozen=True)
class Frozen:
    inside: Any


class MyList(list):
    pass


def tens(leaf: Any, _: str) -> Any:
    return leaf * 10 if isinstance(leaf, int) else leaf


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (3, 30),
        ((1, [2]), (10, [20])),
        ({"a": 1, 2: "s"}, {"a": 10, 2: "s"}),
        (Point(1, 2), Point(10, 20)),
        (Box(1), Box(10)),
        (Frozen([1]), Frozen([10])),
        (OrderedDict(b=1, a=2), OrderedDict(b=10, a=20)),
        (MyList([1]), MyList([10])),
    ],
)
def test_each_container_is_rebuilt_as_its_own_type(value, wanted):
    made = rebuilt(value, tens)
    assert made == wanted
    assert type(made) is type(wanted)
    if isinstance(value, dict):
        assert list(made) == list(value)


class Named(tuple):
    """A tuple with a constructor and an attribute of its own."""

    def __new__(cls, first: Any, second: Any, *, name: str) -> Any:
        made = tuple.__new__(cls, (first, second))
        made.name = name
        return made


class Sized(list):
    def __init__(self, size: int) -> None:
        super().__init__([size] * size)
        self.size = size


class Short(Point):
    def __new__(cls, x: Any) -> Any:
        return super().__new__(cls, x, 0)


def test_constructors_of_subclasses_are_not_called():
    named, sized, short = (
        rebuilt(each, tens) for each in (Named(1, 2, name="n"), Sized(2), Short(3))
    )
    assert (type(named), named, named.name) == (Named, (10, 20), "n")
    assert (type(sized), sized, sized.size) == (Sized, [20, 20], 2)
    assert (type(short), short, short.x) == (Short, (30, 0), 30)


def test_structures_with_themselves_inside_are_compared():
    one: list[Any] = [1]
    one.append(one)
    other: list[Any] = [2]
    other.append(other)
    assert shape(one) == shape(other)
    assert shape(one) != shape([1, [1, 1]])


def test_a_default_dict_keeps_its_factory():
    made = rebuilt(defaultdict(list, a=1), tens)
    assert made == {"a": 10}
    assert made["new"] == []


def test_what_does_not_change_is_the_very_same_object():
    inner: list[Any] = ["a", None]
    value = {"kept": inner, "changed": [1]}
    made = rebuilt(value, tens)
    assert made is not value
    assert made["kept"] is inner
    assert value["changed"] == [1]
    assert rebuilt(inner, tens) is inner


def test_paths_say_where_a_leaf_is():
    value = {"a": [1, Point(2, Box(3))], 4: Frozen(5)}
    assert dict(leaves(value, "0")) == {
        "0['a'][0]": 1,
        "0['a'][1].x": 2,
        "0['a'][1].y.inside": 3,
        "0['a'][1].y.label": "box",
        "0[4].inside": 5,
    }


def test_a_container_inside_itself_ends():
    value: list[Any] = [1]
    value.append(value)
    assert [leaf for _, leaf in leaves(value)] == [1]
    made = rebuilt(value, tens)
    assert made[0] == 10


def test_the_same_container_twice_is_walked_twice():
    shared = [1]
    assert [leaf for _, leaf in leaves([shared, shared])] == [1, 1]
    assert rebuilt([shared, shared], tens) == [[10], [10]]


def test_classes_and_strings_are_leaves():
    for value in (Box, Point, "text", b"bytes", {1, 2}, range(3), None):
        assert children(value) is None


def test_a_data_class_with_a_missing_field_is_walked():
    box = Box(1)
    del box.inside
    assert dict(leaves(box)) == {".label": "box"}


def test_shapes_tell_structures_apart():
    same = ([1, 2], ["x", None])
    different = ([1, 2], [1], (1, 2), {"a": 1}, {"b": 1}, Point(1), Box(1), 1)
    assert shape(same[0]) == shape(same[1])
    shapes = [repr(shape(value)) for value in different]
    assert len(set(shapes)) == len(shapes)


TREES = st.recursive(
    st.integers() | st.text(max_size=2) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Box, inner)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=12,
)


@given(TREES)
def test_walking_and_rebuilding_agree(tree):
    visited: list[tuple[str, Any]] = []

    def note(leaf: Any, path: str) -> Any:
        visited.append((path, leaf))
        return leaf

    assert rebuilt(tree, note) is tree
    assert visited == list(leaves(tree))
    doubled = rebuilt(tree, lambda leaf, _: (leaf,))
    assert [path for path, _ in leaves(doubled)] == [path + "[0]" for path, _ in visited]
