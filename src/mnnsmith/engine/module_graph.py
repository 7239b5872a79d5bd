"""The operators of a `.mnn` file: names, and the tensors that each one takes and gives.

Field numbers are those of the schema of MNN 3.6.1 (`schema/default/MNN.fbs`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from mnnsmith.engine.weight_extent import NET_OPERATORS, OPERATOR_MAIN, OPERATOR_MAIN_TYPE
from mnnsmith.errors import EngineError
from mnnsmith.mnn.flatbuffer import Reader

NET_TENSOR_NAMES = 7
OPERATOR_INPUTS, OPERATOR_NAME, OPERATOR_OUTPUTS, OPERATOR_TYPE = 0, 3, 4, 5
# Operators that compute nothing: Const, Input, TrainableParam.
SOURCES = (11, 34, 266)
# Operators that run other graphs: While, If.
CONTROL = (600, 601)
# Number of the parameter type UnaryOp, of its field `opType`, and there of GELU by tanh.
PARAMETER_UNARY, UNARY_FUNCTION, GELU_BY_TANH = 70, 0, 32


@dataclass(frozen=True)
class OperatorInfo:
    """An operator of the main graph.

    kind: the number of its type in the engine's `OpType`.  inputs, outputs: names of tensors.
    approximates: whether it computes GELU by tanh, where the original may mean the exact form.
    """

    name: str
    kind: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    approximates: bool = False

    @property
    def computes(self) -> bool:
        """Whether its outputs depend on anything: a constant or an input gives itself."""
        return self.kind not in SOURCES

    @property
    def runs_graphs(self) -> bool:
        """Whether it is a branch or a loop."""
        return self.kind in CONTROL


def operators(graph: bytes) -> tuple[OperatorInfo, ...]:
    """The operators of the main graph, in the order of the file.

    Raises EngineError when `graph` is not a whole flatbuffer, or names are no text.
    """
    reader = Reader(graph)
    try:
        net = reader.indirect(0)
        names = [reader.string(place).decode() for place in reader.tables(net, NET_TENSOR_NAMES)]
        return tuple(_operator(reader, place, names) for place in reader.tables(net, NET_OPERATORS))
    except (struct.error, OverflowError, IndexError, UnicodeDecodeError) as error:
        raise EngineError(
            "the graph file is damaged: it does not hold what it points to."
        ) from error


def _operator(reader: Reader, place: int, names: list[str]) -> OperatorInfo:
    name = reader.field(place, OPERATOR_NAME)
    kind = reader.field(place, OPERATOR_TYPE)

    def tensors(field: int) -> tuple[str, ...]:
        found = reader.field(place, field)
        if found is None:
            return ()
        # A negative number stands for an input that is left out.
        indexes = reader.int32s(reader.indirect(found))
        return tuple(names[index] for index in indexes if index >= 0)

    return OperatorInfo(
        reader.string(reader.indirect(name)).decode() if name is not None else "",
        reader.read("<i", kind) if kind is not None else 0,
        tensors(OPERATOR_INPUTS),
        tensors(OPERATOR_OUTPUTS),
        _unary_function(reader, place) == GELU_BY_TANH,
    )


def _unary_function(reader: Reader, place: int) -> int | None:
    """The number of the function that an operator of one operand computes."""
    parameter = reader.field(place, OPERATOR_MAIN_TYPE)
    main = reader.field(place, OPERATOR_MAIN)
    if parameter is None or main is None or reader.read("<B", parameter) != PARAMETER_UNARY:
        return None
    function = reader.field(reader.indirect(main), UNARY_FUNCTION)
    return reader.read("<i", function) if function is not None else 0
