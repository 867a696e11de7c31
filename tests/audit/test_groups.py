"""Replica groups in every form XLA prints, and the mesh axes behind them."""

import numpy as np
import pytest

from jaxpar.audit.groups import MIXED, label, parse_groups, permute_label

MESH = {"data": 2, "fsdp": 4, "pipe": 1, "tensor": 2}  # partition = data * 8 + fsdp * 2 + tensor
AXES = tuple(MESH.items())
IDS = np.arange(16).reshape(2, 4, 2)


def groups(array):
    """Rows as groups."""
    return tuple(tuple(int(i) for i in row) for row in np.asarray(array))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0, 2}, {1, 3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[1,4]<=[4]", [[0, 1, 2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("[4,4]<=[2,4,2]T(0,2,1)", np.arange(16).reshape(2, 4, 2).transpose(0, 2, 1).reshape(4, 4)),
        ("[2,8]<=[2,4,2]T(2,0,1)", np.arange(16).reshape(2, 4, 2).transpose(2, 0, 1).reshape(2, 8)),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("mesh['a'=2,'b'=2] {}", [[0], [1], [2], [3]]),
        ("mesh[a=2,b=2] {b}", [[0, 1], [2, 3]]),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),  # the outer half of a: stride 2 in it
        ("mesh['a'=4,'b'=2] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),  # the inner half
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", [[0, 2], [1, 3]]),
        (  # as reshards print it: the numbers of [2,2,2,2], transposed, fill a mesh of 2 x 4 x 2
            "mesh['x'=2,'y'=4,'z'=2], device_ids=([2,2,2,2]T(0,2,1,3)) {'y':(2)2}",
            np.arange(16).reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(2, 2, 2, 2).swapaxes(2, 3).reshape(8, 2),
        ),
    ],
)
def test_forms(text, expected):
    """*Wrong* for a transposed iota: its dimensions in printed order."""
    everyone = 4
    assert sorted(map(sorted, parse_groups(text, everyone))) == sorted(map(sorted, groups(expected)))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (IDS.reshape(8, 2), "tensor"),
        (IDS.transpose(0, 2, 1).reshape(4, 4), "fsdp"),
        (IDS.transpose(1, 2, 0).reshape(8, 2), "data"),
        (IDS.reshape(2, 8), "fsdp+tensor"),
        (IDS.transpose(2, 0, 1).reshape(2, 8), "data+fsdp"),
        (IDS.reshape(1, 16)[:, ::-1], "data+fsdp+tensor"),  # order within a group does not matter
        ([[0, 2], [4, 6], [8, 10], [12, 14], [1, 3], [5, 7], [9, 11], [13, 15]], "fsdp(2 of 4)"),  # neighbours
        ([[0, 4], [2, 6], [8, 12], [10, 14], [1, 5], [3, 7], [9, 13], [11, 15]], "fsdp(2 of 4)"),  # halves
        ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], "fsdp(2 of 4)+tensor"),
        ([[0, 3], [1, 2], [4, 7], [5, 6]], MIXED),  # a diagonal
        ([[0, 6], [2, 4], [8, 14], [10, 12]], "fsdp(2 of 4)"),
        ([[0, 2, 4], [8, 10, 12]], MIXED),  # three of four
        ([[0, 1], [2, 4]], MIXED),  # different axes in different groups
        ([[0], [1]], ""),
    ],
)
def test_labels(rows, expected):
    """Every set of axes, parts of an axis, and what is neither."""
    assert label(groups(rows), AXES) == expected


def test_parts_of_an_axis_of_eight():
    """Strided, outer and two-level parts are of one axis; irregular ones are mixed."""
    mesh = (("fsdp", 8),)
    assert label(((0, 4), (1, 5), (2, 6), (3, 7)), mesh) == "fsdp(2 of 8)"
    assert label(((0, 1, 4, 5), (2, 3, 6, 7)), mesh) == "fsdp(4 of 8)"
    assert label(((0, 2, 4, 6), (1, 3, 5, 7)), mesh) == "fsdp(4 of 8)"
    assert label(((0, 1, 2, 5), (3, 4, 6, 7)), mesh) == MIXED


def test_permutes_name_the_axes_that_differ():
    """A ring over fsdp, and a move that crosses two axes."""
    ring = [(int(IDS[d, f, t]), int(IDS[d, (f + 1) % 4, t])) for d in range(2) for f in range(4) for t in range(2)]
    assert permute_label(ring, MESH) == "fsdp"
    assert permute_label([(0, 9)], MESH) == "data+tensor"
