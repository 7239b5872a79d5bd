"""Watching a transformers model while it runs: values of modules, and how sure its routers are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import UnsupportedError
from mnnsmith.verify.references.module_values import ModuleValue, wanted_by_module

# How often a router's input is disturbed, and by which part of each element: some ten times what
# float32 leaves uncertain.
_DISTURBANCES = 8
_DISTURBANCE = 3e-5
# How transformers names a layer's router, which gives logits, weights and numbers of the experts.
_ROUTER = ".mlp.gate"
_ROUTER_OUTPUTS = 3


class _Watch:
    """Hooks that are taken off at the end of a `with` block."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()


class ValueWatch(_Watch):
    """Keeps the wanted inputs and outputs of modules."""

    def __init__(
        self, model: Any, known: Mapping[str, ModuleValue], names: Collection[str]
    ) -> None:
        super().__init__()
        self._model = model
        self._known = known
        self._wanted = wanted_by_module(known, names)
        self._parts: dict[str, list[Any]] = defaultdict(list)

    def __enter__(self) -> ValueWatch:
        modules = dict(self._model.named_modules())
        for (module, takes_input), names in self._wanted.items():
            if takes_input:
                hook = self._before(names)
                handle = modules[module].register_forward_pre_hook(hook, with_kwargs=True)
            else:
                handle = modules[module].register_forward_hook(self._after(names))
            self._handles.append(handle)
        return self

    def values(self, windows: int, n: int) -> dict[str, npt.NDArray[np.float32]]:
        """What was kept, by name: float32 [windows, n, width]."""
        return {name: rows.reshape(windows, n, -1) for name, rows in self.rows().items()}

    def rows(self) -> dict[str, npt.NDArray[np.float32]]:
        """The same as rows of the last dimension, float32 [any, width]."""
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}

    def _before(self, names: Collection[str]) -> Any:
        def hook(module: Any, arguments: Any, named: Any) -> None:
            self._keep(names, arguments[0] if arguments else next(iter(named.values())))

        return hook

    def _after(self, names: Collection[str]) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            self._keep(names, output[0] if isinstance(output, tuple) else output)

        return hook

    def _keep(self, names: Collection[str], tensor: Any) -> None:
        for name in names:
            flat = tensor.reshape(-1, tensor.shape[-1]).numpy()
            columns = self._known[name].columns
            # A copy: the module may go on to work in place.
            self._parts[name].append(flat.copy() if columns is None else flat[:, columns])


class RouterWatch(_Watch):
    """Disturbs the input of every router, and sees whether it chooses the same experts."""

    def __init__(self, model: Any, windows: int, n: int, *, expected: bool) -> None:
        """expected: the model has routers; then that none is found is an error."""
        super().__init__()
        self._model = model
        self._expected = expected
        self._shape = (windows, n)
        self._sure: dict[str, list[Any]] = defaultdict(list)

    def __enter__(self) -> RouterWatch:
        """Raises `UnsupportedError` where a mixture of experts has no router that we know."""
        for name, module in self._model.named_modules():
            if name.endswith(_ROUTER):
                self._handles.append(module.register_forward_hook(self._hook(name)))
        if self._expected and not self._handles:
            raise _unknown_router(f"no module is named *{_ROUTER}")
        return self

    @property
    def decisive(self) -> npt.NDArray[np.bool_]:
        """bool [windows]: whether no choice within changed."""
        sure = np.ones(self._shape, dtype=np.bool_)
        for parts in self._sure.values():
            sure &= np.concatenate(parts).reshape(self._shape)
        found: npt.NDArray[np.bool_] = np.all(sure, axis=-1)
        return found

    def _hook(self, name: str) -> Any:
        import torch

        generator = torch.Generator().manual_seed(0)

        def hook(module: Any, arguments: Any, output: Any) -> None:
            if not isinstance(output, tuple) or len(output) != _ROUTER_OUTPUTS:
                raise _unknown_router(f"{name} gives {type(output).__name__}")
            chosen = output[2].sort(-1).values
            same = torch.ones(len(chosen), dtype=torch.bool)
            for _ in range(_DISTURBANCES):
                noise = torch.randn(arguments[0].shape, generator=generator)
                _, _, other = module.forward(arguments[0] * (1 + _DISTURBANCE * noise))
                same &= (other.sort(-1).values == chosen).all(-1)
            self._sure[name].append(same.numpy())

        return hook


def _unknown_router(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"The routers of this mixture of experts cannot be watched: {what}.",
        "Use the ONNX reference (--reference onnx), or the transformers version of the extra.",
    )
