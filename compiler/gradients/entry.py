"""`dnnc.grad` and `dnnc.value_and_grad`: of a function of array code, or of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from dnnc.frontends.trace import gradients as functions
from dnnc.gradients.models import grad_of_model
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Graph

if TYPE_CHECKING:
    from typing import Concatenate

    from typing_extensions import Unpack

Wrt = str | Sequence[str] | bool
First = TypeVar("First")
Second = TypeVar("Second")
Value = TypeVar("Value")
Aux = TypeVar("Aux")


class OfModels(TypedDict, total=False):
    """The settings of a model's gradient, see `dnnc.gradients.models.grad_of_model`."""

    of: str | Sequence[str] | None
    cotangent: str | None
    dims: Mapping[str, Any] | None
    shapes: Mapping[str, Sequence[int | None]] | None
    values: Mapping[str, Any] | None
    custom_ops: Mapping[str, Callable[..., Any] | str] | None


OF_MODELS = tuple(OfModels.__annotations__)


@overload
def grad(
    fn: Callable[Concatenate[First, ...], Any], /, argnums: Literal[0] = 0, has_aux: Literal[False] = False
) -> Callable[..., First]: ...
@overload
def grad(
    fn: Callable[Concatenate[First, Second, ...], Any], /, argnums: Literal[1], has_aux: Literal[False] = False
) -> Callable[..., Second]: ...
@overload
def grad(
    fn: Callable[Concatenate[First, Second, ...], Any],
    /,
    argnums: tuple[Literal[0], Literal[1]],
    has_aux: Literal[False] = False,
) -> Callable[..., tuple[First, Second]]: ...
@overload
def grad(
    fn: Callable[Concatenate[First, ...], tuple[Any, Aux]], /, argnums: Literal[0] = 0, *, has_aux: Literal[True]
) -> Callable[..., tuple[First, Aux]]: ...
@overload
def grad(fn: Callable[..., Any], /, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]: ...
@overload
def grad(model: Any, /, *, wrt: Wrt, **settings: Unpack[OfModels]) -> Graph: ...
def grad(
    fn: Any, /, argnums: int | Sequence[int] = 0, has_aux: bool = False, *, wrt: Wrt | None = None, **settings: Any
) -> Any:
    """The gradient of a function by its arguments, or of a model by weights and inputs.

    Args:
        fn: a function of array code that gives one real float number; or a model: a path of an `.onnx` file, its bytes,
            a ModelProto, a dnnc.ir Graph.
        argnums: of a function: the positional arguments to differentiate by.
        has_aux: of a function: does it give a pair of the number and further results?
        wrt: of a model: the names of float weights and inputs to differentiate by; True for all weights.
        **settings: of a model: `of`, the output to differentiate; `cotangent`, `dims`, `shapes`, `values`,
            `custom_ops`; see `dnnc.gradients.models.grad_of_model`.

    Returns:
        Of a function, one of the same arguments that gives the gradient (and with `has_aux` the further results): in
        the structure, shapes and dtypes of the argument, a tuple with several `argnums`. Of a model, a graph for
        `dnnc.compile` and `dnnc.to_onnx` with an output `grad_NAME` for each name.

    Raises:
        GradientError: the result is not one float number, an argument has integers, or an op has no derivative; names
            the op, and the line or the node.
        InputError: a name that the model does not have; an argument that does not fit the model or function.
    """
    if wrt is None:
        _no_settings(fn, settings)
        return functions.grad(fn, argnums, has_aux)
    return grad_of_model(_model(fn), wrt, **_settings(settings))


@overload
def value_and_grad(
    fn: Callable[Concatenate[First, ...], Value], /, argnums: Literal[0] = 0, has_aux: Literal[False] = False
) -> Callable[..., tuple[Value, First]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[First, Second, ...], Value], /, argnums: Literal[1], has_aux: Literal[False] = False
) -> Callable[..., tuple[Value, Second]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[First, Second, ...], Value],
    /,
    argnums: tuple[Literal[0], Literal[1]],
    has_aux: Literal[False] = False,
) -> Callable[..., tuple[Value, tuple[First, Second]]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[First, ...], tuple[Value, Aux]], /, argnums: Literal[0] = 0, *, has_aux: Literal[True]
) -> Callable[..., tuple[tuple[Value, Aux], First]]: ...
@overload
def value_and_grad(
    fn: Callable[..., Any], /, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]: ...
@overload
def value_and_grad(model: Any, /, *, wrt: Wrt, **settings: Unpack[OfModels]) -> Graph: ...
def value_and_grad(
    fn: Any, /, argnums: int | Sequence[int] = 0, has_aux: bool = False, *, wrt: Wrt | None = None, **settings: Any
) -> Any:
    """The value beside the gradient; arguments as for `grad`.

    Of a function, one that gives `(value, gradient)`, or `((value, aux), gradient)`. Of a model, a graph that has the
    model's outputs ahead of the gradients.
    """
    if wrt is None:
        _no_settings(fn, settings)
        return functions.value_and_grad(fn, argnums, has_aux)
    return grad_of_model(_model(fn), wrt, value=True, **_settings(settings))


def _no_settings(fn: Any, settings: dict[str, Any]) -> None:
    if not callable(fn):
        raise InputError("grad: of a model it takes wrt=, the names of weights and inputs to differentiate by")
    if settings:
        raise InputError(f"grad: {', '.join(settings)} are for models; a function takes argnums and has_aux")


def _model(fn: Any) -> Any:
    if callable(fn) and not isinstance(fn, Graph):
        raise InputError("grad: wrt is for models; a function takes argnums, the numbers of its arguments")
    return fn


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    unknown = [n for n in settings if n not in OF_MODELS]
    if unknown:
        raise InputError(f"grad: {', '.join(unknown)}: models take {', '.join(OF_MODELS)}")
    return settings
