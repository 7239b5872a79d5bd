"""How many bytes of weights a binary graph reads: the engine does not notice a file cut short.

A `.mnn` file is a flatbuffer.  Only the path to the `external` fields is followed (offset into the
weight file, then the sizes of the parts that lie there one after another); the field numbers are
those of the schema of MNN 3.6.1 (`schema/default/*.fbs`), every offset is checked.
"""

from __future__ import annotations

import itertools
import struct

from mnnsmith.errors import EngineError
from mnnsmith.mnn.flatbuffer import Reader

NET_OPERATORS, NET_SUBGRAPHS = 3, 10
SUBGRAPH_OPERATORS = 4
OPERATOR_MAIN_TYPE, OPERATOR_MAIN, OPERATOR_EXTERNAL_PATH = 1, 2, 7
# Number of the parameter type in the union -> number of its field `external`: Blob,
# Convolution2D, Scale, Convolution3D, LayerNorm, GroupNorm.
EXTERNAL_FIELDS = {7: 9, 9: 6, 58: 3, 80: 3, 88: 5, 95: 6}


def required_weight_bytes(graph: bytes) -> int:
    """The least size of the weight file of the `.mnn` file `graph`.

    Raises EngineError when it is not a whole flatbuffer, has millions of operators, or one whose
    weights lie in another file (while a graph is converted they may, in a finished one never).
    """
    reader = Reader(graph)
    try:
        net = reader.indirect(0)
        operators = itertools.chain(
            reader.tables(net, NET_OPERATORS),
            *(
                reader.tables(part, SUBGRAPH_OPERATORS)
                for part in reader.tables(net, NET_SUBGRAPHS)
            ),
        )
        return max((_operator_end(reader, operator) for operator in operators), default=0)
    except (struct.error, OverflowError) as error:
        raise EngineError("the graph file is damaged: an offset points outside of it.") from error


def _operator_end(reader: Reader, operator: int) -> int:
    kind = reader.field(operator, OPERATOR_MAIN_TYPE)
    main = reader.field(operator, OPERATOR_MAIN)
    elsewhere = reader.field(operator, OPERATOR_EXTERNAL_PATH)
    if elsewhere is not None:
        raise EngineError("the graph file is damaged: an operator reads a file outside the bundle.")
    if kind is None or main is None:
        return 0
    external_field = EXTERNAL_FIELDS.get(reader.read("<B", kind))
    if external_field is None:
        return 0
    place = reader.field(reader.indirect(main), external_field)
    if place is None:
        return 0
    values = list(reader.int64s(reader.indirect(place)))
    if any(value < 0 for value in values):
        raise EngineError(f"the graph file is damaged: it places weights at {values}.")
    return sum(values)
